"""A shard's half of the protocol: which contributions it holds in whole, and what to do with them. Pure: the driver
keeps the bytes and carries out what is said here."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.exchange import messages as m
from paceline.policies.core import Key


@dataclass(frozen=True, slots=True)
class Store:
    """Keep the payload of one piece of a contribution."""

    key: Key
    push: m.Push


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop all payloads kept under these keys."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out `Reduce`, `Apply`, `Send` or `Forget` on the values."""

    order: m.Reduce | m.Apply | m.Send | m.Forget


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the coordinator."""

    message: m.Message


Action = Store | Discard | Do | Tell


@dataclass(slots=True)
class Shard:
    """Pieces of contributions by key. `steps` holds the last step of each (worker, incarnation) that is settled, so
    that a message that comes twice changes nothing."""

    pieces: frozenset[int]
    to_init: set[int]
    version: int = 0
    staged: dict[Key, set[int]] = field(default_factory=dict)
    steps: dict[tuple[int, int], int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)


def initialised(shard: Shard, piece: int) -> list[Action]:
    """The initial values of a piece are here."""
    if piece not in shard.to_init:
        return []
    shard.to_init.discard(piece)
    return [] if shard.to_init else [Tell(m.Initialised())]


def push(shard: Shard, worker: int, incarnation: int, message: m.Push) -> list[Action]:
    """A piece of a contribution is here. Repeats, and what a lost worker sent, are ignored."""
    key = (worker, incarnation, message.step)
    held = shard.staged.get(key, set())
    settled = shard.steps.get((worker, incarnation), -1)
    if message.piece in held or message.step <= settled or incarnation <= shard.gone.get(worker, -1):
        return []
    held = shard.staged.setdefault(key, set())
    held.add(message.piece)
    actions: list[Action] = [Store(key, message)]
    return [*actions, Tell(m.Staged(key))] if held >= shard.pieces else actions


def order(shard: Shard, message: m.Message) -> list[Action]:
    """The coordinator orders; orders come in one sequence, the same on every shard."""
    match message:
        case m.Reduce(_, parts):
            for key, _, _ in parts:
                _settle(shard, key)
            return [Do(message)]
        case m.Apply(version):
            shard.version = version
            return [Do(message)]
        case m.Send():
            return [Do(message)]
        case m.Drop(key):
            _settle(shard, key)
            return [Discard((key,))]
        case m.Forget(worker, incarnation):
            shard.gone[worker] = max(incarnation, shard.gone.get(worker, -1))
            keys = tuple(key for key in shard.staged if key[:2] == (worker, incarnation))
            for key in keys:
                del shard.staged[key]
            shard.steps.pop((worker, incarnation), None)
            return [Discard(keys), Do(message)]
    return []


def _settle(shard: Shard, key: Key) -> None:
    shard.staged.pop(key, None)
    shard.steps[key[:2]] = max(key[2], shard.steps.get(key[:2], -1))
