"""Worlds in which tests play random schedules: `Pace` for a policy alone, `World` for the whole protocol."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.errors import JobError
from paceline.policies import REGISTRY, Policy
from paceline.policies.core import (
    Action,
    Arrived,
    Contribution,
    Discard,
    Event,
    Joined,
    Key,
    Left,
    Paused,
    Release,
    Resumed,
    Update,
)

Move = tuple[str, int, float]
"""What to do, to which worker (modulo those that can), and the weight of a contribution."""


def instances(kind: str) -> list[Policy]:
    """The policy called `kind` with a handful of values for each of its settings, without those that it refuses."""
    cls = REGISTRY[kind]
    hints = get_type_hints(cls)
    choices: list[Iterable[Any]] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if get_origin(hint) is Literal:
            choices.append(get_args(hint))
        else:
            known: dict[Any, list[Any]] = {int: [-1, 0, 1, 2, 3, 7], float: [-1.0, 0.0, 0.5], bool: [False, True]}
            choices.append(known.get(hint, [field.default]))
    made = []
    for values in itertools.product(*choices):
        try:
            made.append(cls(*values))
        except JobError:
            continue
    return made


POLICIES = [policy for kind in REGISTRY for policy in instances(kind)]


class Pace:
    """A policy, and workers that keep to the protocol: they contribute once, wait for leave, read the newest version.

    Checks after each event what holds for every policy, and keeps what happened for what holds for one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.state = policy.initial()
        self.reads: dict[int, int] = {}
        self.waits: set[int] = set()
        self.idle: set[int] = set()
        self.steps: dict[int, int] = {}
        self.lives: dict[int, int] = {}
        self.events: list[Event] = []
        self.actions: list[list[Action]] = []
        self.clock_of: dict[Key, int] = {}
        self.update_of: dict[Key, int] = {}
        self.discards: dict[Key, str] = {}
        self.version = 0

    @property
    def live(self) -> set[int]:
        return self.reads.keys() | self.waits | self.idle

    def say(self, event: Event) -> list[Action]:
        before = set(self.state.active)
        actions = self.policy.step(self.state, event)
        self.events.append(event)
        self.actions.append(actions)
        for action in actions:
            self._check(action, before)
        self._check_state()
        return actions

    def join(self, worker: int) -> list[Action]:
        self.lives[worker] = self.lives.get(worker, -1) + 1
        self.steps[worker] = 0
        self.reads[worker] = self.version
        actions = self.say(Joined(worker))
        self.reads[worker] = self.version
        return actions

    def leave(self, worker: int) -> list[Action]:
        self.reads.pop(worker, None)
        self.waits.discard(worker)
        self.idle.discard(worker)
        return self.say(Left(worker))

    def pause(self, worker: int) -> list[Action]:
        del self.reads[worker]
        self.idle.add(worker)
        return self.say(Paused(worker))

    def resume(self, worker: int) -> list[Action]:
        self.idle.discard(worker)
        self.reads[worker] = self.version
        actions = self.say(Resumed(worker))
        self.reads[worker] = self.version
        return actions

    def arrive(self, worker: int, weight: float = 1.0) -> list[Action]:
        contribution = Contribution(worker, self.lives[worker], self.steps[worker], self.reads.pop(worker), weight)
        self.steps[worker] += 1
        self.waits.add(worker)
        self.clock_of[contribution.key] = self.state.clocks[worker]
        return self.say(Arrived(contribution))

    def move(self, what: str, which: int, weight: float) -> None:
        """Make one move if any worker can."""
        can: dict[str, Iterable[int]] = {
            "arrive": self.reads,
            "pause": self.reads,
            "resume": self.idle,
            "leave": self.live,
            "join": set(range(5)) - self.live,
        }
        workers = sorted(can[what])
        if workers:
            worker = workers[which % len(workers)]
            self.arrive(worker, weight) if what == "arrive" else getattr(self, what)(worker)

    def _check(self, action: Action, before: set[int]) -> None:
        match action:
            case Update(version, parts):
                assert version == self.version + 1, "versions are numbered one by one"
                self.version = version
                workers = [part.contribution.worker for part in parts]
                assert workers == sorted(set(workers)), "an update takes distinct workers, in their order"
                total = sum(part.contribution.weight for part in parts)
                for part in parts:
                    contribution = part.contribution
                    assert contribution.weight > 0
                    assert part.coefficient == contribution.weight / total, "the divisor is the weight used"
                    assert part.staleness == version - 1 - contribution.version
                    self._end(contribution.key)
                    self.update_of[contribution.key] = version
            case Discard(contribution, reason):
                assert reason
                self._end(contribution.key)
                self.discards[contribution.key] = reason
            case Release(worker, version):
                assert worker in self.waits, "who goes on has waited"
                assert version == self.version, "who goes on gets the newest version"
                self.waits.discard(worker)
                self.reads[worker] = version

    def _end(self, key: Key) -> None:
        assert key in self.clock_of
        assert key not in self.update_of, "a contribution is applied once"
        assert key not in self.discards, "a contribution ends once"

    def _check_state(self) -> None:
        state = self.state
        assert state.version == self.version
        assert set(state.waiting) == self.waits
        assert state.clocks.keys() == self.live
        assert state.active_count == len(state.active)
        tally: dict[int, int] = {}
        for worker in state.active:
            tally[state.clocks[worker]] = tally.get(state.clocks[worker], 0) + 1
        assert state.tally == tally
        open_keys = self.clock_of.keys() - self.update_of.keys() - self.discards.keys()
        assert {c.key for c in state.pending.values()} == open_keys, "none is lost"
        assert not self.waits or self.reads, "nobody waits when nobody is left to wait for"
