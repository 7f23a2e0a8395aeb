"""What every policy shares: the events it sees, the actions it answers with, its state, and the registry.

A policy is a frozen dataclass whose fields are its settings. It is a pure state machine: `initial()` gives a state,
`step(state, event)` changes that state (which the driver owns) and returns actions. It knows names and weights, never
tensors, clocks or sockets.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.errors import JobError, nearest

Key = tuple[int, int, int]
"""A contribution's name: (worker, incarnation, step)."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's gradient of one step, complete on every shard.

    `version` is the version of the parameters it was computed from; `weight` the examples (or tokens) behind it,
    0 for a contribution that must not count (a gradient that was not finite).
    """

    worker: int
    incarnation: int
    step: int
    version: int
    weight: float

    @property
    def key(self) -> Key:
        return (self.worker, self.incarnation, self.step)


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker takes part from now on."""

    worker: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker departed or was lost; it is waited for no longer."""

    worker: int


@dataclass(frozen=True, slots=True)
class Paused:
    """A worker has no data at present; nobody waits for it until it resumes."""

    worker: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A paused worker has data again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A contribution is complete."""

    contribution: Contribution


Event = Joined | Left | Paused | Resumed | Arrived

# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One contribution's share of an update.

    `lam` is the strength of delay compensation (0: none), `staleness` the updates between read and use.
    """

    contribution: Contribution
    coefficient: float
    staleness: int
    lam: float = 0.0


@dataclass(frozen=True, slots=True)
class Update:
    """Apply `sum(coefficient * gradient)` over `parts` as the optimizer step that makes `version`.

    The learning rate of this update is multiplied by `lr_scale`.
    """

    version: int
    parts: tuple[Part, ...]
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Discard:
    """A contribution that will be in no update, and why."""

    contribution: Contribution
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """A worker may begin its next step, from `version`."""

    worker: int
    version: int


Action = Update | Discard | Release

LATE = "late"
LEFT = "worker left"
NO_WEIGHT = "no weight"
OUT_OF_TURN = "out of turn"


@dataclass(slots=True)
class State:
    """The state of any policy: plain, comparable, copyable.

    `clocks` counts each live worker's finished steps, `tally` how many active workers stand at each clock; `pending`
    holds each worker's contribution that is in no update yet, in the order in which they came; `waiting` the workers
    that finished a step and were not released, who waits longest first.
    """

    version: int = 0
    clocks: dict[int, int] = field(default_factory=dict)
    tally: dict[int, int] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    pending: dict[int, Contribution] = field(default_factory=dict)
    waiting: dict[int, None] = field(default_factory=dict)

    @property
    def active(self) -> set[int]:
        """The live workers that have data: those a step may wait for."""
        return self.clocks.keys() - self.paused

    @property
    def active_count(self) -> int:
        """How many they are; unlike `active`, it costs the same whatever their number."""
        return len(self.clocks) - len(self.paused)


@dataclass(frozen=True)
class Policy:
    """When contributions become an update, and when a worker may go on. Subclasses say so in `settle`."""

    kind: ClassVar[str]
    assignment: ClassVar[str] = "dynamic"
    """How the epoch's examples are handed out unless the job says otherwise: "dynamic" or "fixed"."""

    @property
    def needs_read(self) -> bool:
        """Whether shards must remember the values each worker has read."""
        return False

    def initial(self) -> State:
        return State()

    def step(self, state: State, event: Event) -> list[Action]:
        """Take one event into `state` and say what follows from it, in order."""
        actions: list[Action] = []
        match event:
            case Joined(worker):
                if worker not in state.clocks:
                    state.clocks[worker] = slowest(state)
                    _count(state, worker, 1)
            case Left(worker):
                _count(state, worker, -1)
                state.clocks.pop(worker, None)
                state.paused.discard(worker)
                state.waiting.pop(worker, None)
                if (lost := state.pending.pop(worker, None)) is not None:
                    actions.append(Discard(lost, LEFT))
            case Paused(worker):
                if worker in state.clocks:
                    _count(state, worker, -1)
                    state.paused.add(worker)
            case Resumed(worker):
                if worker in state.paused:
                    state.clocks[worker] = max(state.clocks[worker], slowest(state))
                    state.paused.discard(worker)
                    _count(state, worker, 1)
            case Arrived(contribution):
                worker = contribution.worker
                if worker not in state.clocks or worker in state.pending:
                    return [Discard(contribution, OUT_OF_TURN if worker in state.clocks else LEFT)]
                _count(state, worker, -1)
                state.clocks[worker] += 1
                _count(state, worker, 1)
                state.pending[worker] = contribution
                state.waiting[worker] = None
        return actions + self.settle(state)

    def settle(self, state: State) -> list[Action]:
        """What can be decided now: updates from `state.pending`, releases from `state.waiting`."""
        raise TypeError(f"{type(self).__name__} must define settle(state)")


def slowest(state: State) -> int:
    """The least clock among the active workers; where there is none, the greatest of the paused ones, or 0."""
    return min(state.tally) if state.tally else max(state.clocks.values(), default=0)


def _count(state: State, worker: int, change: int) -> None:
    """Add or take off an active worker at its clock; others are not counted."""
    if worker in state.clocks and worker not in state.paused:
        clock = state.clocks[worker]
        state.tally[clock] = state.tally.get(clock, 0) + change
        if not state.tally[clock]:
            del state.tally[clock]


def merge(state: State, lr_scale: float = 1.0, lam: float = 0.0) -> list[Action]:
    """Make all pending contributions one update, weighted by examples: `g = sum(b_k / B * g_k)`, in worker order.

    `B` is the sum of the weights used. A contribution of weight 0 is discarded, and no update is made of those alone.
    """
    contributions = [state.pending[worker] for worker in sorted(state.pending)]
    state.pending.clear()
    actions: list[Action] = [Discard(c, NO_WEIGHT) for c in contributions if not c.weight > 0]
    used = [c for c in contributions if c.weight > 0]
    if used:
        total = sum(c.weight for c in used)
        parts = tuple(Part(c, c.weight / total, state.version - c.version, lam) for c in used)
        state.version += 1
        actions.append(Update(state.version, parts, lr_scale))
    return actions


def release(state: State, workers: set[int]) -> list[Action]:
    """Let `workers` go on from the present version, in worker order."""
    for worker in workers:
        state.waiting.pop(worker, None)
    return [Release(worker, state.version) for worker in sorted(workers)]


# The registry ---------------------------------------------------------------------------------------------------------

REGISTRY: dict[str, type[Policy]] = {}


def register(cls: type[Policy]) -> type[Policy]:
    """Make a policy known by its `kind`: to the Python API, TOML, the command line, the docs and the tests."""
    if cls.kind in REGISTRY:
        raise TypeError(f"two policies are called {cls.kind!r}")
    REGISTRY[cls.kind] = cls
    return cls


def find(kind: str) -> type[Policy]:
    """The policy called `kind`; a JobError offers the nearest name."""
    if kind not in REGISTRY:
        raise JobError(f"unknown policy {kind!r}", nearest(kind, list(REGISTRY)))
    return REGISTRY[kind]


def settings(cls: type[Policy]) -> dict[str, Any]:
    """The settings of a policy and their defaults, in the order of the short form `kind:first,second`."""
    return {f.name: f.default for f in dataclasses.fields(cls)}
