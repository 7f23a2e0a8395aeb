"""Runs on virtual time: the coordinator and the shards of a real run, with computing and transfers that take as long as
they are said to. Writes nothing and needs no torch."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.exchange import messages as m
from paceline.exchange.coordinator import End
from paceline.job import Job
from paceline.simulate.driver import Driver
from paceline.simulate.faults import Event, Faults, Join, Kill, Pause
from paceline.state.spec import ModelSpec, OptimizerSpec, TensorSpec

Action = tuple[Any, ...]
"""A decision in the form in which runs can be compared: ("update", ((worker, step, weight, staleness), ...)),
("discard", worker, step, weight, reason), ("join", worker), ("leave", worker) or ("epoch", epoch, used, skipped)."""


@dataclass(frozen=True)
class Simulation:
    """What a simulated run did. Times count from when the first worker joined.

    `seconds`: until the last worker was through its epochs; `log`: the coordinator's records, as (seconds, kind,
    fields); `compute_s` and `wait_s`: of each worker, all its lives together, waiting being all that is not computing;
    `error` and `what`: why the run ended early, as in `paceline.errors`, or empty.
    """

    seconds: float
    log: list[tuple[float, str, dict[str, Any]]]
    compute_s: dict[int, float] = field(default_factory=dict)
    wait_s: dict[int, float] = field(default_factory=dict)
    error: str = ""
    what: str = ""

    @property
    def updates(self) -> int:
        return sum(kind == "update" for _, kind, _ in self.log)

    @property
    def examples(self) -> int:
        """Examples whose gradient is in an update."""
        return round(sum(part[2] for _, kind, fields in self.log if kind == "update" for part in fields["parts"]))

    @property
    def staleness(self) -> dict[int, int]:
        """How many contributions were how many updates late."""
        parts = (part for _, kind, fields in self.log if kind == "update" for part in fields["parts"])
        return dict(sorted(Counter(part[3] for part in parts).items()))

    def actions(self) -> list[Action]:
        """The decisions alone, in order; of workers that come or go in a row, in the order of their ranks."""
        return _normal((kind, fields) for _, kind, fields in self.log)


def simulate(
    job: Job,
    examples: int,
    batch: int,
    epochs: int = 1,
    compute_s: float | Sequence[float] | Callable[[int, int], float] = 0.0,
    parameters_bytes: int = 0,
    bandwidth_bits_per_s: float = float("inf"),
    latency_s: float = 0.0,
    events: Sequence[Event] = (),
) -> Simulation:
    """Run `job` on virtual time: `epochs` epochs of `examples` examples in batches of `batch`.

    `compute_s` is the time of a batch: one for all, one for each worker, or a function of (worker, step); `job.slow`
    multiplies it. A message between two processes takes `latency_s`, and pieces of the `parameters_bytes` their bytes'
    time at `bandwidth_bits_per_s` as well; the transfers of a link queue. Serving takes no time.

    Raises JobError for a number out of range, and TimedOut when workers wait for one that never comes.

    >>> run = simulate(Job(workers=2, slow={1: 3.0}), examples=8, batch=1, epochs=1, compute_s=1.0)
    >>> run.seconds, run.updates, run.wait_s
    (12.0, 4, {0: 8.0, 1: 0.0})
    """
    at_least = {"examples": (examples, 1), "batch": (batch, 1), "epochs": (epochs, 1)}
    at_least |= {"parameters_bytes": (parameters_bytes, 0)}
    for name, (value, low) in at_least.items():
        if value < low:
            raise JobError(f"{name} = {value}", f"{name} must be {low} or more")
    if not bandwidth_bits_per_s > 0:
        raise JobError(f"bandwidth_bits_per_s = {bandwidth_bits_per_s}", "a link carries more than 0 bits per second")
    if not latency_s >= 0:
        raise JobError(f"latency_s = {latency_s}", "latency_s must be 0 or more")
    if isinstance(compute_s, Sequence) and len(compute_s) < job.workers:
        raise JobError(f"compute_s has {len(compute_s)} times", f"give one for each of the {job.workers} workers")
    driver = Driver(
        job, _register(examples, batch, parameters_bytes), epochs, _timing(compute_s), bandwidth_bits_per_s, latency_s,
        events,
    )  # fmt: skip
    return _result(driver, driver.run())


def from_folder(run_folder: str | os.PathLike[str]) -> list[Action]:
    """The decisions of a real run, from the events in its folder, in the form of `Simulation.actions()`. Raises
    JobError when there are none."""
    file = Path(run_folder) / "events" / "server-0.jsonl"
    if not file.exists():
        raise JobError(f"{os.fspath(run_folder)!r} is no run folder", "give runs/NAME, a folder with events in it")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return _normal((row["kind"], row) for row in rows)


def _register(examples: int, batch: int, parameters_bytes: int) -> m.Register:
    optimizer = OptimizerSpec("torch.optim.sgd:SGD", ({},), elementwise=True)
    tensor = TensorSpec("parameters", (parameters_bytes,), "uint8", group=0)
    return m.Register(ModelSpec((tensor,), (), optimizer), m.DataSpec(examples, batch))


def _result(driver: Driver, end: End) -> Simulation:
    began_s = next((time_s for time_s, kind, _ in driver.log if kind == "join"), 0.0)
    compute_s: dict[int, float] = {}
    wait_s: dict[int, float] = {}
    for worker, busy_s in driver.busy_s.items():
        alive_s = driver.ended_s.get(worker, driver.now_s) - max(driver.began_s[worker], began_s)
        compute_s[worker.rank] = compute_s.get(worker.rank, 0.0) + busy_s
        wait_s[worker.rank] = wait_s.get(worker.rank, 0.0) + max(0.0, alive_s - busy_s)
    log = [(time_s - began_s, kind, fields) for time_s, kind, fields in driver.log]
    last_s = driver.now_s if end.error else max(driver.ended_s.values())
    return Simulation(last_s - began_s, log, compute_s, wait_s, end.error, end.what)


def _timing(compute_s: float | Sequence[float] | Callable[[int, int], float]) -> Callable[[int, int], float]:
    if callable(compute_s):
        return compute_s
    if isinstance(compute_s, Sequence):
        return lambda worker, step: compute_s[worker]
    return lambda worker, step: compute_s


def _normal(records: Iterable[tuple[str, dict[str, Any]]]) -> list[Action]:
    actions: list[Action] = []
    for kind, fields in records:
        match kind:
            case "update":
                actions.append((kind, tuple(tuple(part) for part in fields["parts"])))
            case "discard":
                actions.append((kind, *(fields[key] for key in ("worker", "step", "weight", "reason"))))
            case "epoch":
                actions.append((kind, *(fields[key] for key in ("epoch", "used", "skipped"))))
            case "join" | "leave":
                actions.append((kind, fields["worker"]))
    rows = [(kind, list(row)) for kind, row in groupby(actions, key=lambda action: action[0])]
    return [action for kind, row in rows for action in (sorted(row) if kind in ("join", "leave") else row)]


__all__ = ["Action", "Event", "Faults", "Join", "Kill", "Pause", "Simulation", "from_folder", "simulate"]
