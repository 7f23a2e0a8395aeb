"""The ledger of examples: who holds which range of the epoch's order, so that every example is used once.

The ledger deals in ranges of positions; workers turn positions into examples with a permutation that all compute from
the same seed. Each batch is one grant. A grant ends in an update (used), is skipped (its gradient was not finite), or
comes back (its worker was lost, or its gradient was discarded) and is granted again. The epoch ends for everybody when
nothing is left and nothing is out. Pure: no clock, no random source.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

Range = tuple[int, int]

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Enter:
    """A worker takes part in the epochs from now on."""

    worker: int


@dataclass(frozen=True, slots=True)
class Exit:
    """A worker takes part no longer; what it holds comes back."""

    worker: int


@dataclass(frozen=True, slots=True)
class Take:
    """A worker asks for the next batch of `epoch`. With `wait` it has nothing left in hand and stands still until there
    is a batch or the epoch ends; without, it learns at once when there is none at present."""

    worker: int
    epoch: int
    wait: bool


@dataclass(frozen=True, slots=True)
class Settle:
    """What became of grants: they are in an update, skipped for good, or to be done again."""

    worker: int
    grants: tuple[int, ...]
    fate: Literal["used", "skipped", "returned"]


Event = Enter | Exit | Take | Settle

# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    worker: int
    grant: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Nothing at present, but the epoch is not over."""

    worker: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """The worker stands still: nobody should wait for it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The worker has a batch again."""

    worker: int


@dataclass(frozen=True, slots=True)
class Over:
    """The epoch is over for this worker."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class EpochEnded:
    epoch: int
    used: int
    skipped: int


Action = Granted | Empty | Stalled | Resumed | Over | EpochEnded


@dataclass(slots=True)
class Ledger:
    """`examples` positions an epoch, in batches of `batch`, dealt to whoever asks ("dynamic") or, from the start, to
    the workers in turn ("fixed", as DistributedSampler does; what a lost worker leaves goes to whoever asks).

    `examples = 0` stands for data that each worker brings itself: nothing is dealt, and an epoch ends when all have
    run out.
    """

    examples: int
    batch: int
    drop_last: bool = False
    assignment: Literal["dynamic", "fixed"] = "dynamic"
    epoch: int = -1
    is_open: bool = False
    workers: set[int] = field(default_factory=set)
    pool: deque[Range] = field(default_factory=deque)
    own: dict[int, deque[Range]] = field(default_factory=dict)
    out: dict[int, tuple[int, Range]] = field(default_factory=dict)
    stalled: dict[int, int] = field(default_factory=dict)
    next_grant: int = 0
    size: int = 0
    used: int = 0
    skipped: int = 0


def step(ledger: Ledger, event: Event) -> list[Action]:
    """Take one event into the ledger and say what follows."""
    match event:
        case Enter(worker):
            ledger.workers.add(worker)
            return []
        case Exit(worker):
            ledger.workers.discard(worker)
            ledger.stalled.pop(worker, None)
            _let_go(ledger, worker)
            return _serve(ledger) + _finish(ledger)
        case Take(worker, epoch, wait):
            return _take(ledger, worker, epoch, wait)
        case Settle(worker, grants, fate):
            mine = [g for g in dict.fromkeys(grants) if g in ledger.out and ledger.out[g][0] == worker]
            if fate == "returned":
                _return(ledger, mine)
                return _serve(ledger) + _finish(ledger)
            count = sum(stop - start for start, stop in (ledger.out.pop(g)[1] for g in mine))
            if fate == "used":
                ledger.used += count
            else:
                ledger.skipped += count
            return _finish(ledger)


def ranges(ledger: Ledger, grants: tuple[int, ...]) -> list[Range]:
    """The position ranges of grants that are out."""
    return [ledger.out[grant][1] for grant in grants if grant in ledger.out]


def _take(ledger: Ledger, worker: int, epoch: int, wait: bool) -> list[Action]:
    if epoch < ledger.epoch or (epoch == ledger.epoch and not ledger.is_open):
        return [Over(worker, epoch)]
    if epoch > ledger.epoch and not ledger.is_open:
        _open(ledger, epoch)
    if epoch == ledger.epoch and (granted := _grant(ledger, worker)) is not None:
        return [granted]
    if not wait:
        return [Empty(worker)]
    if epoch > ledger.epoch:
        _let_go(ledger, worker)
    ledger.stalled[worker] = epoch
    return [Stalled(worker), *_serve(ledger), *_finish(ledger)]


def _open(ledger: Ledger, epoch: int) -> None:
    ledger.epoch, ledger.is_open, ledger.used, ledger.skipped = epoch, True, 0, 0
    ledger.pool.clear()
    ledger.own.clear()
    ledger.out.clear()
    size = ledger.size = ledger.examples - (ledger.examples % ledger.batch if ledger.drop_last else 0)
    batches = [(start, min(start + ledger.batch, size)) for start in range(0, size, ledger.batch)]
    if ledger.assignment == "fixed":
        order = sorted(ledger.workers)
        ledger.own = {worker: deque(batches[i :: len(order)]) for i, worker in enumerate(order)}
    else:
        ledger.pool.extend(batches)


def _grant(ledger: Ledger, worker: int) -> Granted | None:
    queue = ledger.own.get(worker) or ledger.pool
    if not queue:
        return None
    start, stop = queue.popleft()
    grant, ledger.next_grant = ledger.next_grant, ledger.next_grant + 1
    ledger.out[grant] = (worker, (start, stop))
    return Granted(worker, grant, ledger.epoch, start, stop)


def _return(ledger: Ledger, grants: list[int]) -> None:
    ledger.pool.extendleft(reversed([ledger.out.pop(grant)[1] for grant in grants]))


def _let_go(ledger: Ledger, worker: int) -> None:
    """A worker takes part in the open epoch no longer: what it holds, and what was dealt to it, is for the others."""
    _return(ledger, [grant for grant, (holder, _) in ledger.out.items() if holder == worker])
    ledger.pool.extend(ledger.own.pop(worker, ()))


def _serve(ledger: Ledger) -> list[Action]:
    """Grant what came back to those who stand still, first come first served."""
    actions: list[Action] = []
    while ledger.pool:
        worker = next((w for w, epoch in ledger.stalled.items() if epoch == ledger.epoch), None)
        if worker is None or (granted := _grant(ledger, worker)) is None:
            break
        del ledger.stalled[worker]
        actions += [Resumed(worker), granted]
    return actions


def _complete(ledger: Ledger) -> bool:
    """Whether nothing of the open epoch is left to do: all is used, or every worker broke out of it. Without any
    worker, what is left waits for one."""
    everyone_stands = bool(ledger.workers) and ledger.workers <= ledger.stalled.keys()
    if everyone_stands and all(epoch > ledger.epoch for epoch in ledger.stalled.values()):
        return True
    if ledger.examples:
        return not ledger.pool and not ledger.out and not any(ledger.own.values())
    return everyone_stands


def _finish(ledger: Ledger) -> list[Action]:
    """Where the open epoch is complete, end it for all who wait; those who wait for a later one begin it."""
    if not ledger.is_open or not _complete(ledger):
        return []
    ledger.is_open = False
    waiting, ledger.stalled = ledger.stalled, {}
    actions: list[Action] = [EpochEnded(ledger.epoch, ledger.used, ledger.skipped)]
    for worker, epoch in sorted(waiting.items(), key=lambda item: item[1]):
        actions.append(Resumed(worker))
        actions += [Over(worker, epoch)] if epoch <= ledger.epoch else _take(ledger, worker, epoch, wait=True)
    return actions
