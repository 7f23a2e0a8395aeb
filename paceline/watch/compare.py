"""Several runs of one job beside each other."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console

from paceline.watch.curves import Curve, curve, time_to
from paceline.watch.summary import summarise
from paceline.watch.tables import table

TIE = 0.05
"""Two times that differ by less than this share are called equal."""


class Row(Struct):
    """One run. Seconds and examples are of training, without starting up; `to_target_s` is the time until the smoothed
    loss reached the target; shares are of all workers' time."""

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


class Comparison(Struct):
    """All runs, and the loss whose time is compared: the one given, or else the lowest that every run has reached."""

    target: float | None
    rows: list[Row]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def show(self, console: Console) -> None:
        """Print the table."""
        metric = next((row.metric for row in self.rows if row.metric), None)
        goal = "to target" if self.target is None else f"to loss {self.target:.3g}"
        head = ["policy", "time", goal, "loss", *([metric] if metric else [])]
        head += ["updates", "examples/s", "waiting", "staleness mean, max", "discarded"]
        shown = table("The same job under each policy", *head)
        for row in self.rows:
            cells = [row.label, f"{row.seconds:.1f} s", "-" if row.to_target_s is None else f"{row.to_target_s:.1f} s"]
            cells.append("-" if row.loss is None else f"{row.loss:.4f}")
            if metric:
                cells.append("-" if row.metric_value is None else f"{row.metric_value:.4f}")
            cells += [str(row.updates), f"{row.examples_per_s:.0f}", f"{100 * row.shares['waiting']:.0f}%"]
            cells += [f"{row.mean_staleness:.1f}, {row.max_staleness}", str(row.discarded)]
            shown.add_row(*cells, style="red" if row.status != "ok" else None)
        console.print(shown)
        for row in self.rows:
            if row.status != "ok":
                console.print(f"{row.label} ended as: {row.status}", style="red", markup=False, soft_wrap=True)


def compare(runs: dict[str, Path], target: float | None = None) -> Comparison:
    """Read the run folders (label to folder). Without a `target`, the largest of the runs' least smoothed losses is
    taken, which every run that finished has reached."""
    curves = {label: curve(folder) for label, folder in runs.items()}
    rows = [_row(label, folder, curves[label]) for label, folder in runs.items()]
    if target is None:
        best = [min(curves[row.label].loss) for row in rows if curves[row.label].loss and row.status == "ok"]
        target = max(best, default=None)
    for row in rows:
        row.to_target_s = None if target is None else time_to(curves[row.label], target)
    return Comparison(target, rows)


def read_aloud(comparison: Comparison) -> str:
    """One sentence that reads the result."""
    rows = [row for row in comparison.rows if row.status == "ok"]
    failed = [row.label for row in comparison.rows if row.status != "ok"]
    tail = f" {', '.join(failed)} failed." if failed else ""
    timed = sorted((r for r in rows if r.to_target_s is not None), key=lambda r: r.to_target_s or 0.0)
    if not timed:
        return f"No run reached a target loss, so there is no time to compare.{tail}"
    best, last = timed[0], timed[-1]
    best_s, last_s = best.to_target_s or 0.0, last.to_target_s or 0.0
    what = f"a loss of {comparison.target:.3g}"
    if len(timed) == 1:
        return f"{best.label} reached {what} in {best_s:.1f} s.{tail}"
    if last_s <= best_s * (1 + TIE):
        return f"All reached {what} in about the same time, {best_s:.1f} s.{tail}"
    equal = [r.label for r in timed if (r.to_target_s or 0.0) <= best_s * (1 + TIE)]
    first = " and ".join(equal) if len(equal) <= 2 else ", ".join(equal[:-1]) + f" and {equal[-1]}"
    paid = []
    if best.max_staleness:
        paid.append(f"gradients that were {best.mean_staleness:.1f} updates old on average")
    if best.discarded:
        paid.append(f"{best.discarded} contributions thrown away and done again")
    price = f", at the price of {' and '.join(paid)}" if paid else ", at no price in staleness or discarded work"
    waited = f", whose workers spent {100 * last.shares['waiting']:.0f}% of their time waiting"
    times = f"{last_s / max(best_s, 1e-9):.1f} times as fast as {last.label}"
    return (
        f"{first} reached {what} first, in {best_s:.1f} s: {times}"
        f"{waited if last.shares['waiting'] > best.shares['waiting'] else ''}{price}.{tail}"
    )


def _row(label: str, folder: Path, found: Curve) -> Row:
    summary = summarise(folder)
    spent = {
        "computing": sum(w.compute_s for w in summary.workers),
        "sending": sum(w.send_s for w in summary.workers),
        "waiting": sum(w.wait_s for w in summary.workers),
        "no data": sum(w.idle_s for w in summary.workers),
    }
    total_s = sum(spent.values())
    metric = next(iter(sorted(found.metrics, key=lambda key: key != "accuracy")), None)
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
        metric_value=found.metrics[metric][-1][1] if metric else None,
        to_target_s=None,
        mean_staleness=summary.mean_staleness,
        max_staleness=summary.max_staleness,
        discarded=sum(summary.discarded.values()),
        shares={key: value / total_s if total_s else 0.0 for key, value in spent.items()},
    )
