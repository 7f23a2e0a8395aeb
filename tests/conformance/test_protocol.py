"""Coordinator, shards and workers together, under any schedule of deliveries, deaths, joins and repeats."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.policies import BSP
from tests.schedules import POLICIES
from tests.worlds import Setting, World


def random_setting(rng: random.Random, **fixed: object) -> Setting:
    settings: dict[str, object] = {
        "workers": rng.randint(1, 4),
        "servers": rng.randint(1, 4),
        "examples": rng.randint(1, 14),
        "batch": rng.randint(1, 3),
        "epochs": rng.randint(1, 3),
        "assignment": rng.choice(["dynamic", "fixed"]),
        "on_loss": rng.choice(["continue", "restart"]),
        "accumulate": rng.choice([1, 1, 2]),
        "own": rng.choice([(), (), (), (3, 2, 0)]),
        "twice": rng.choice([0.0, 0.3]),
        "bad": rng.choice([0.0, 0.0, 0.2]),
        "clips": rng.choice([0.0, 0.5, 1.0]),
        "breaks": rng.choice([0.0, 0.0, 0.1]),
        "seed": rng.randrange(10**9),
    }
    return Setting(**{**settings, **fixed})  # type: ignore[arg-type]


def play(world: World, rng: random.Random, moves: int, faults: float) -> None:
    """Make random moves, then bring the run to its end. `faults` is the share of deaths and joins."""
    for _ in range(moves):
        if world.end is not None:
            break
        mortal, absent = world.mortal(), world.absent()
        if rng.random() < faults and (mortal or absent):
            if mortal and (not absent or rng.random() < 0.5):
                world.kill(rng.choice(mortal))
            else:
                world.join(rng.choice(absent))
        elif world.computing and rng.random() < 0.2:
            world.compute(rng.choice(sorted(world.computing, key=lambda worker: worker.rank)))
        elif links := world.busy():
            world.deliver(rng.choice(links))
    world.finish(rng)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_random_schedules(policy: object) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        setting = random_setting(rng, policy=policy)
        world = World(setting)
        try:
            play(world, rng, moves=rng.choice([0, 100, 400]), faults=rng.choice([0.0, 0.02, 0.1]))
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}") from error


class Protocol(RuleBasedStateMachine):
    """The same, with a schedule that is made small when it fails."""

    @initialize(policy=st.sampled_from(POLICIES), seed=st.integers(0, 10**6))
    def start(self, policy: object, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(random_setting(self.rng, policy=policy))

    @rule(number=st.integers(0, 99), count=st.integers(1, 20))
    def deliver(self, number: int, count: int) -> None:
        for _ in range(count):
            if self.world.end is None and (links := self.world.busy()):
                self.world.deliver(links[number % len(links)])

    @precondition(lambda self: self.world.computing)
    @rule(number=st.integers(0, 9))
    def compute(self, number: int) -> None:
        workers = sorted(self.world.computing, key=lambda worker: worker.rank)
        self.world.compute(workers[number % len(workers)])

    @precondition(lambda self: self.world.end is None and self.world.mortal())
    @rule(number=st.integers(0, 9))
    def kill(self, number: int) -> None:
        workers = self.world.mortal()
        self.world.kill(workers[number % len(workers)])

    @precondition(lambda self: self.world.end is None and self.world.absent())
    @rule(number=st.integers(0, 9))
    def join(self, number: int) -> None:
        ranks = self.world.absent()
        self.world.join(ranks[number % len(ranks)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish(self.rng) if self.world.end is None else self.world.check_end()


Protocol.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestProtocol = Protocol.TestCase


def test_one_sequence_for_all_shards_with_clipping() -> None:
    for seed in range(5):
        world = World(Setting(BSP(), workers=3, servers=3, clips=1.0, seed=seed))
        world.finish(random.Random(seed))
        kinds = [type(order).__name__ for order in world.hosts[0].orders]
        assert kinds.count("Reduce") == kinds.count("Apply") == 4
        assert all(b == "Apply" for a, b in itertools.pairwise(kinds) if a == "Reduce")
