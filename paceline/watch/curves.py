"""The loss of a run against time and against examples, over all its workers."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from pathlib import Path

from paceline.watch.events import read_all
from paceline.watch.summary import began_s

WINDOW = 20
"""The smoothed loss is an exponential average over about so many logged values of all workers."""


@dataclass(frozen=True)
class Curve:
    """Three lists of one length: seconds since training began, examples applied by then, and the smoothed loss.
    `not_finite` counts the logged losses that were not finite and are left out. `metrics` are other values that were
    logged: name to a list of (seconds, value)."""

    seconds: list[float] = field(default_factory=list)
    examples: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    not_finite: int = 0
    metrics: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def curve(folder: Path) -> Curve:
    """Merge the logged losses of all workers in the order of time. Values that are not finite are left out."""
    events = read_all(folder)
    start_s = began_s(events)
    if start_s is None:
        return Curve()
    applied_s, applied = [0.0], [0.0]
    for event in events.get("server-0", []):
        if event["kind"] == "update":
            applied_s.append(event["t"] - start_s)
            applied.append(applied[-1] + sum(part[2] for part in event["parts"]))
    logs = [e for name, rows in events.items() if name.startswith("worker-") for e in rows if e["kind"] == "log"]
    losses = [e["values"]["loss"] for e in logs if "loss" in e["values"]]
    result = Curve(not_finite=losses.count(None))  # JSON has null for a value that is not finite
    mean = weight = 0.0
    keep = 1 - 1 / WINDOW
    for event in sorted(logs, key=lambda e: e["t"]):
        seconds = event["t"] - start_s
        for key, value in event["values"].items():
            if value is None:
                continue
            if key != "loss":
                result.metrics.setdefault(key, []).append((seconds, value))
                continue
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
            result.seconds.append(seconds)
            result.examples.append(applied[bisect.bisect_right(applied_s, seconds) - 1])
            result.loss.append(mean / weight)
    return result


def time_to(found: Curve, target: float) -> float | None:
    """Seconds until the smoothed loss is at or below `target`; None when it never is.

    >>> time_to(Curve([1.0, 2.0, 3.0], [8, 16, 24], [0.9, 0.4, 0.5]), 0.5)
    2.0
    """
    return next((s for s, loss in zip(found.seconds, found.loss, strict=True) if loss <= target), None)
