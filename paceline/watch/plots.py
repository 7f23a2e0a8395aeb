"""Pictures of runs."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from paceline.watch.compare import Comparison, read_aloud
from paceline.watch.curves import curve
from paceline.watch.summary import summarise
from paceline.watch.tables import in_seconds, number

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The Okabe-Ito palette, which colour-blind people can tell apart; after seven runs the lines are dashed."""

KINDS = {
    "computing": ("#4A4A4A", "white"),
    "sending": ("#8F8F8F", "black"),
    "waiting": ("#F0E442", "black"),
    "no data": ("#DDDDDD", "black"),
}
"""Colours that no run has, of bars and of the text on them."""

DASHES = ("-", "--", ":")
POINTS = 4000
"""Of a longer curve so many points are drawn."""


def draw(comparison: Comparison, path: Path) -> None:
    """Loss against seconds and against examples, and where the workers' time went, for each run of a comparison."""
    figure, (left, middle, right) = _figure(3, (15, 4.6), [1.2, 1.2, 1])
    labels = [row.label if row.status == "ok" else f"{row.label} (failed)" for row in comparison.rows]
    for i, (row, label) in enumerate(zip(comparison.rows, labels, strict=True)):
        colour, found = COLOURS[i % len(COLOURS)], curve(Path(row.folder))
        every = slice(None, None, len(found.loss) // POINTS + 1)
        style: dict[str, Any] = {"color": colour, "linestyle": DASHES[i // len(COLOURS) % 3], "linewidth": 1.8}
        left.plot(found.seconds[every], found.loss[every], label=label, **style)
        middle.plot(found.examples[every], found.loss[every], label=label, **style)
        if comparison.target is not None and row.to_target_s is not None:
            marker: dict[str, Any] = {"color": colour, "markersize": 8, "markeredgecolor": "white", "zorder": 5}
            left.plot([row.to_target_s], [comparison.target], "o", **marker)
    if comparison.target is not None:
        for axes in (left, middle):
            axes.axhline(comparison.target, color="#888888", linestyle=":", linewidth=1)
        left.annotate(
            f"target {comparison.target:.3g}",
            (0.01, comparison.target),
            xycoords=("axes fraction", "data"),
            ha="left",
            va="bottom",
            fontsize=8,
            color="#666666",
        )
    _loss_axes(left, "seconds of training", "Loss against time")
    _loss_axes(middle, "examples used", "Loss against examples")
    if comparison.rows:
        left.legend(frameon=False, fontsize=8 if len(labels) > 5 else 10)
    _bars(right, labels, [row.shares for row in comparison.rows])
    right.set_title("Where the workers' time went", loc="left", fontsize=11)
    _save(figure, path, read_aloud(comparison))


def draw_run(folder: Path, path: Path) -> None:
    """One run: its loss against time, where each worker's time went, and how stale its contributions were."""
    summary, found = summarise(folder), curve(folder)
    figure, (left, middle, right) = _figure(3, (15, 4.6), [1.2, 1.1, 1])
    every = slice(None, None, len(found.loss) // POINTS + 1)
    left.plot(found.seconds[every], found.loss[every], color=COLOURS[0], linewidth=1.8)
    _loss_axes(left, "seconds of training", "Loss against time")
    _bars(middle, [f"worker {row.worker}" for row in summary.workers], [row.shares for row in summary.workers])
    middle.set_title("Where each worker's time went", loc="left", fontsize=11)
    right.bar(list(summary.staleness), list(summary.staleness.values()), color=COLOURS[0])
    right.set_xlabel("updates between read and use")
    right.set_ylabel("contributions")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.set_title("Staleness", loc="left", fontsize=11)
    did = f"{summary.updates} updates with {number(summary.examples)} examples in {in_seconds(summary.seconds)}"
    _save(figure, path, f"{summary.policy}: {did}" + ("" if summary.status == "ok" else f"; status: {summary.status}"))


def _figure(columns: int, size: tuple[float, float], widths: list[float]) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, width_ratios=widths)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _loss_axes(axes: Any, label: str, title: str) -> None:
    values = [y for line in axes.get_lines() for y in line.get_ydata()]
    if values and min(values) > 0 and max(values) > 5 * min(values):
        axes.set_yscale("log")
    if not values:
        axes.text(0.5, 0.5, "no loss was logged", transform=axes.transAxes, ha="center", color="#666666")
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.set_ylabel("loss (smoothed)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.25)


def _bars(axes: Any, labels: list[str], shares: list[dict[str, float]]) -> None:
    left = [0.0] * len(labels)
    for kind, (colour, ink) in KINDS.items():
        widths = [100 * share[kind] for share in shares]
        axes.barh(labels, widths, left=left, color=colour, label=kind, height=0.6)
        for i, width in enumerate(widths):
            if width >= 8:
                axes.text(left[i] + width / 2, i, f"{width:.0f}%", ha="center", va="center", fontsize=8, color=ink)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlim(0, 100)
    axes.invert_yaxis()
    axes.set_xlabel("% of the workers' time")
    axes.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8)


def _save(figure: Any, path: Path, title: str) -> None:
    text = textwrap.fill(title, 165).replace("$", r"\$")
    figure.suptitle(text, x=0.005, ha="left", fontsize=12)
    figure.savefig(path, dpi=150)
