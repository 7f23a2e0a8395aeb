"""Several runs of one job beside each other."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from paceline.watch.curves import Curve, curve, time_to
from paceline.watch.summary import shares, summarise
from paceline.watch.tables import in_seconds, show_table, table, times

TIE = 0.05
"""Two times that differ by less than this share are called equal."""


class Row(Struct):
    """One run. Seconds and examples are of training, without starting up; `to_target_s` is the time until the smoothed
    loss reached the target; shares are of all workers' time; `not_finite` counts logged losses that were not finite."""

    label: str
    folder: str
    status: str
    seconds: float
    updates: int
    examples: float
    examples_per_s: float
    loss: float | None
    metric: str | None
    metric_value: float | None
    to_target_s: float | None
    mean_staleness: float
    max_staleness: int
    discarded: int
    shares: dict[str, float]
    not_finite: int = 0


class Comparison(Struct):
    """All runs, and the loss whose time is compared: the one given, or else the lowest that every run has reached."""

    target: float | None
    rows: list[Row]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def show(self, console: Console) -> None:
        """Print the table."""
        metric = next((row.metric for row in self.rows if row.metric), None)
        goal = "" if self.target is None else f" (target: a loss of {self.target:.3g})"
        head = ["policy", "time", "to target", "loss", *([metric] if metric else [])]
        head += ["updates", "ex/s", "waiting", "staleness mean, max", "discarded"]
        shown = table(f"The same job under each policy{goal}", *head)
        for row in self.rows:
            to_target = "-" if row.to_target_s is None else in_seconds(row.to_target_s)
            cells = [row.label, in_seconds(row.seconds), to_target]
            cells.append("-" if row.loss is None else f"{row.loss:.4f}")
            if metric:
                cells.append("-" if row.metric_value is None else f"{row.metric_value:.4f}")
            cells += [str(row.updates), f"{row.examples_per_s:.0f}", f"{100 * row.shares['waiting']:.0f}%"]
            cells += [f"{row.mean_staleness:.1f}, {row.max_staleness}", str(row.discarded)]
            shown.add_row(*cells, style="red" if row.status != "ok" else None)
        show_table(shown, console)
        for row in self.rows:
            if row.status != "ok":
                console.print(f"{row.label} ended as: {row.status}", style="red", markup=False, soft_wrap=True)


def compare(runs: dict[str, Path], target: float | None = None) -> Comparison:
    """Read the run folders (label to folder). Without a `target`, the largest of the runs' least smoothed losses is
    taken, which every run that finished has reached."""
    curves = {label: curve(folder) for label, folder in runs.items()}
    metrics = list(dict.fromkeys(name for found in curves.values() for name in found.metrics))
    metric = "accuracy" if "accuracy" in metrics else next(iter(metrics), None)
    rows = [_row(label, folder, curves[label], metric) for label, folder in runs.items()]
    if target is None:
        best = [min(curves[row.label].loss) for row in rows if curves[row.label].loss and row.status == "ok"]
        target = max(best, default=None)
    for row in rows:
        row.to_target_s = None if target is None else time_to(curves[row.label], target)
    return Comparison(target, rows)


def read_aloud(comparison: Comparison) -> str:
    """One sentence that reads the result: who was first, by how much, what it paid, and what went wrong."""
    rows = [row for row in comparison.rows if row.status == "ok"]
    timed = sorted((row for row in rows if row.to_target_s is not None), key=_to_target_s)
    clauses = [_result(comparison.target, rows, timed)]
    if timed and (never := [row.label for row in rows if row.to_target_s is None]):
        clauses.append(f"{_and(never)} did not reach it")
    clauses += [f"{r.label} logged a loss that was not finite {times(r.not_finite)}" for r in rows if r.not_finite]
    if failed := [row.label for row in comparison.rows if row.status != "ok"]:
        clauses.append(f"{_and(failed)} failed")
    return "; ".join(clauses) + "."


def _result(target: float | None, rows: list[Row], timed: list[Row]) -> str:
    if not rows:
        return "No run finished, so there is no time to compare"
    if not timed:
        ended = [(row.loss, row.label) for row in rows if row.loss is not None]
        if target is None or not ended:
            return "No run reached a target loss, so there is no time to compare"
        nearest = min(ended)
        return f"No run reached a loss of {target:.3g}: {nearest[1]} came nearest, ending at {nearest[0]:.3g}"
    what, best, last = f"a loss of {target:.3g}", timed[0], timed[-1]
    best_s, last_s = _to_target_s(best), _to_target_s(last)
    first = [row for row in timed if _to_target_s(row) <= best_s * (1 + TIE)]
    names = _and([row.label for row in first])
    if len(timed) == 1:
        alone, paid = (" alone", _paid(best)) if len(rows) > 1 else ("", "")
        return f"{names}{alone} reached {what} in {in_seconds(best_s)}{paid}"
    if len(first) == len(timed):
        return f"{names} reached {what} in about the same time, {in_seconds(best_s)}"
    waited = f", whose workers spent {100 * last.shares['waiting']:.0f}% of their time waiting"
    waited = waited if last.shares["waiting"] > best.shares["waiting"] else ""
    faster = f"{last_s / max(best_s, 1e-9):.1f} times as fast as {last.label}{waited}"
    if len(first) == 1:
        return f"{names} reached {what} first, in {in_seconds(best_s)}: {faster}{_paid(best)}"
    prices = "".join(f"; {row.label}{_paid(row).removeprefix(',')}" for row in first)
    return f"{names} reached {what} first, in about {in_seconds(best_s)}: {faster}{prices}"


def _paid(row: Row) -> str:
    paid = []
    if row.max_staleness:
        paid.append(f"gradients that were {row.mean_staleness:.1f} updates old on average")
    if row.discarded:
        paid.append(f"{row.discarded} contribution{'s' if row.discarded > 1 else ''} thrown away")
    return f", at the price of {' and '.join(paid)}" if paid else ", at no price in staleness or discarded work"


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _to_target_s(row: Row) -> float:
    return row.to_target_s or 0.0


def _row(label: str, folder: Path, found: Curve, metric: str | None) -> Row:
    summary = summarise(folder)
    return Row(
        label=label,
        folder=str(folder),
        status=summary.status if summary.status == "ok" else (summary.error or summary.status),
        seconds=summary.seconds,
        updates=summary.updates,
        examples=summary.examples,
        examples_per_s=summary.examples_per_s,
        loss=found.loss[-1] if found.loss else None,
        metric=metric,
        metric_value=found.metrics[metric][-1][1] if metric in found.metrics else None,
        to_target_s=None,
        mean_staleness=summary.mean_staleness,
        max_staleness=summary.max_staleness,
        discarded=sum(summary.discarded.values()),
        shares=shares(summary.workers),
        not_finite=found.not_finite,
    )
