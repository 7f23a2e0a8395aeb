"""What may go wrong in a simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker dies; what has not left it by then is lost."""

    worker: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A worker is suspended; for longer than the lease, it is lost."""

    worker: int
    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """A worker comes: one more, or a lost one again."""

    worker: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Faults:
    """Random faults, the same for the same seed: each message takes up to `delay_s` longer (a link keeps its order),
    the messages of a contribution come twice with probability `duplicate`, and a worker dies during a step with
    probability `kill`, unless it is the last."""

    seed: int
    delay_s: float = 0.0
    duplicate: float = 0.0
    kill: float = 0.0


Event = Kill | Pause | Join | Faults
