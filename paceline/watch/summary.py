"""The summary of a run: where each process's time went, what was used and what was not."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
from msgspec import Struct

from paceline.watch.events import Event, read_all

KINDS = {"computing": "compute_s", "sending": "send_s", "waiting": "wait_s", "no data": "idle_s"}
"""What a worker's time goes to, and the field of its events that says how much, in seconds."""


class WorkerRow(Struct):
    """One worker. Times in seconds: computing, sending, waiting to be let on, waiting for data; `shares` are those of
    their sum. `loss` is the last that it logged, None when that was not finite; `not_finite` counts such losses.
    The bytes of a process that did not finish are not known, and 0."""

    worker: int
    status: str
    steps: int = 0
    examples: float = 0.0
    examples_per_s: float = 0.0
    compute_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    discarded: int = 0
    loss: float | None = None
    not_finite: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    shares: dict[str, float] = {}


class ServerRow(Struct):
    """One server. Times in seconds: applying updates, and nothing to do. All are 0 when it did not finish."""

    server: int
    status: str
    updates: int = 0
    apply_s: float = 0.0
    idle_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


class EpochRow(Struct):
    """One epoch's examples: in an update, and left out for good."""

    epoch: int
    examples: int
    used: int
    skipped: int


class Summary(Struct):
    """A whole run. `seconds` go from the first step's begin to the last update; `staleness` counts contributions by the
    number of updates between read and use; `discarded` counts contributions by reason."""

    run: str
    status: str
    error: str | None
    policy: str
    seconds: float
    updates: int
    examples: float
    examples_per_s: float
    mean_staleness: float
    max_staleness: int
    staleness: dict[int, int]
    discarded: dict[str, int]
    workers: list[WorkerRow]
    servers: list[ServerRow]
    epochs: list[EpochRow]


def summarise(folder: Path) -> Summary:
    """Read a run folder's events; a process that died is summed from what it wrote before."""
    events = read_all(Path(folder))
    launcher, first = events.get("launcher", []), events.get("server-0", [])
    job = next((e for e in launcher if e["kind"] == "job"), {})
    end = next((e for e in reversed(launcher) if e["kind"] == "end"), {})
    updates = [e for e in first if e["kind"] == "update"]
    seconds = _seconds(events, updates)
    staleness: Counter[int] = Counter(part[3] for e in updates for part in e["parts"])
    used: defaultdict[int, float] = defaultdict(float)
    for event in updates:
        for worker, _, weight, _ in event["parts"]:
            used[worker] += weight
    examples = sum(used.values())
    count = staleness.total()
    when = dict(job.get("when", {}))
    settings = ", ".join(f"{key}={value}" for key, value in when.items() if key != "kind")
    return Summary(
        run=str(folder),
        status=end.get("status", "unknown"),
        error=end.get("error"),
        policy=f"{when['kind']}({settings})" if when else "unknown policy",
        seconds=round(seconds, 3),
        updates=len(updates),
        examples=examples,
        examples_per_s=round(examples / seconds, 1) if seconds else 0.0,
        mean_staleness=round(sum(tau * n for tau, n in staleness.items()) / count, 3) if count else 0.0,
        max_staleness=max(staleness, default=0),
        staleness=dict(sorted(staleness.items())),
        discarded=dict(Counter(e["reason"] for e in first if e["kind"] == "discard")),
        workers=[_worker(int(name[7:]), rows, first, used) for name, rows in _named(events, "worker-")],
        servers=[_server(int(name[7:]), rows) for name, rows in _named(events, "server-")],
        epochs=[EpochRow(e["epoch"], e["examples"], e["used"], e["skipped"]) for e in first if e["kind"] == "epoch"],
    )


def write_metrics(folder: Path) -> None:
    """Write the summary to `metrics.json`: aside, then renamed."""
    aside = Path(folder) / "metrics.json.part"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(summarise(folder)), indent=2) + b"\n")
    os.replace(aside, Path(folder) / "metrics.json")


def shares(rows: list[WorkerRow]) -> dict[str, float]:
    """What part of the time of all these workers went to each kind; all 0 when there was none."""
    spent_s = {kind: sum(getattr(row, key) for row in rows) for kind, key in KINDS.items()}
    total_s = sum(spent_s.values())
    return {kind: time_s / total_s if total_s else 0.0 for kind, time_s in spent_s.items()}


def began_s(events: dict[str, list[Event]]) -> float | None:
    """When training began, in unix seconds: the begin of the earliest step."""
    steps = [
        e["t"] - sum(e[key] for key in KINDS.values()) for rows in events.values() for e in rows if e["kind"] == "step"
    ]
    return min(steps, default=None)


def _seconds(events: dict[str, list[Event]], updates: list[Event]) -> float:
    start = began_s(events)
    return max(0.0, updates[-1]["t"] - start) if updates and start is not None else 0.0


def _named(events: dict[str, list[Event]], prefix: str) -> list[tuple[str, list[Event]]]:
    return sorted(((k, v) for k, v in events.items() if k.startswith(prefix)), key=lambda item: int(item[0][7:]))


def _worker(rank: int, rows: list[Event], coordinator: list[Event], used: defaultdict[int, float]) -> WorkerRow:
    steps = [e for e in rows if e["kind"] == "step"]
    ends = [e for e in rows if e["kind"] == "end"]
    losses = [e["values"]["loss"] for e in rows if e["kind"] == "log" and "loss" in e["values"]]
    leaves = [e for e in coordinator if e["kind"] == "leave" and e["worker"] == rank]
    failed = next((e["message"] for e in rows if e["kind"] == "error"), None)
    if failed is not None:
        status = f"failed: {failed}"
    elif leaves and leaves[-1]["reason"] != "finished" and not ends:
        status = f"lost: {leaves[-1]['reason']}"
    else:
        status = "finished" if ends else "did not finish"
    times = {key: round(sum(e[key] for e in steps), 6) for key in KINDS.values()}
    examples = used[rank]
    spent_s = sum(times.values())
    row = WorkerRow(
        worker=rank,
        status=status,
        steps=len(steps),
        examples=examples,
        examples_per_s=round(examples / spent_s, 1) if spent_s else 0.0,
        discarded=sum(e["kind"] == "discard" and e["worker"] == rank for e in coordinator),
        loss=losses[-1] if losses else None,
        not_finite=losses.count(None),
        bytes_in=sum(e["bytes_in"] for e in ends),
        bytes_out=sum(e["bytes_out"] for e in ends),
        **times,
    )
    row.shares = shares([row])
    return row


def _server(index: int, rows: list[Event]) -> ServerRow:
    end = next((e for e in reversed(rows) if e["kind"] == "end"), None)
    failed = next((e["message"] for e in rows if e["kind"] == "error"), None)
    if end is None:
        return ServerRow(index, "did not finish" if failed is None else f"failed: {failed}")
    status = "finished" if failed is None else f"failed: {failed}"
    return ServerRow(index, status, end["updates"], end["apply_s"], end["idle_s"], end["bytes_in"], end["bytes_out"])
