"""What every policy must keep to. A new one is tested as soon as it is registered."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import job as jobs
from paceline.policies import REGISTRY, Policy
from paceline.policies.core import Release, Update
from tests.schedules import POLICIES, Move, Pace

SCHEDULES = st.lists(
    st.tuples(
        st.sampled_from(["arrive"] * 6 + ["join", "leave", "pause", "resume"]),
        st.integers(0, 4),
        st.sampled_from([0.0, 1.0, 3.0]),
    ),
    max_size=50,
)

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=str)


def play(policy: Policy, workers: int, schedule: list[Move]) -> Pace:
    pace = Pace(policy)
    for worker in range(workers):
        pace.join(worker)
    for move in schedule:
        pace.move(*move)
    return pace


def test_every_kind_has_settings_to_test() -> None:
    assert {policy.kind for policy in POLICIES} == REGISTRY.keys()


@every_policy
@given(schedule=SCHEDULES)
@settings(max_examples=40, deadline=None)
def test_each_contribution_ends_once_and_nothing_hangs(policy: Policy, schedule: list[Move]) -> None:
    pace = play(policy, 3, schedule)  # which checks that nobody waits where nobody computes
    for worker in sorted(pace.live):
        pace.leave(worker)
    assert pace.clock_of.keys() == pace.update_of.keys() | pace.discards.keys()


@every_policy
@given(schedule=SCHEDULES)
@settings(max_examples=25, deadline=None)
def test_who_waits_goes_on_when_the_others_do(policy: Policy, schedule: list[Move]) -> None:
    pace = play(policy, 3, schedule)
    for waiter in sorted(pace.waits):
        steps = pace.steps[waiter]
        for _ in range(30):
            if waiter not in pace.waits:
                break
            for worker in sorted(pace.reads.keys() - {waiter}):
                pace.arrive(worker)
        assert waiter not in pace.waits, f"worker {waiter} still waits after step {steps}"


@every_policy
@given(schedule=SCHEDULES, cut=st.integers(0, 50))
@settings(max_examples=25, deadline=None)
def test_pure(policy: Policy, schedule: list[Move], cut: int) -> None:
    """The same events from an equal state give equal actions and an equal state, whatever happened elsewhere."""
    pace = play(policy, 3, schedule)
    cut = min(cut, len(pace.events))
    state = policy.initial()
    for event in pace.events[:cut]:
        policy.step(state, event)
    other = copy.deepcopy(state)
    assert other == state
    rest = [policy.step(state, event) for event in pace.events[cut:]]
    assert rest == pace.actions[cut:]
    assert [copy.deepcopy(policy).step(other, event) for event in pace.events[cut:]] == rest
    assert state == other == pace.state
    assert policy.initial() == policy.initial()
    assert hash(policy) == hash(copy.deepcopy(policy))


@every_policy
def test_with_one_worker_it_is_the_plain_optimizer(policy: Policy) -> None:
    pace = play(policy, 1, [])
    for version in range(1, 9):
        update, release = pace.arrive(0, weight=float(version))
        assert isinstance(update, Update)
        (part,) = update.parts
        assert (update.version, part.coefficient, part.staleness, update.lr_scale) == (version, 1.0, 0, 1.0)
        assert release == Release(0, version)


@every_policy
def test_the_last_of_several_is_one_worker(policy: Policy) -> None:
    pace = play(policy, 4, [("arrive", 1, 1.0), ("arrive", 2, 1.0)])
    for worker in (0, 1, 3):
        pace.leave(worker)
    assert 2 in pace.reads, "it does not wait for those that left"
    pace.arrive(2)
    assert 2 in pace.reads


@every_policy
def test_all_its_forms_read_back(policy: Policy, tmp_path: Path) -> None:
    assert jobs.policy(policy) is policy
    assert jobs.policy(jobs.label(policy)) == policy
    assert jobs.policy(jobs.to_table(policy)) == policy
    file = tmp_path / "job.toml"
    job = jobs.job(when=policy)
    file.write_text(jobs.to_toml(job))
    assert jobs.load(file) == job
    sets = [f"when.{key}={value}" for key, value in jobs.to_table(policy).items()]
    assert jobs.job(**jobs.with_sets({}, tuple(sets))).when == policy


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=list(REGISTRY))
def test_it_says_what_it_is(cls: type[Policy]) -> None:
    assert cls.__doc__
    assert cls.assignment in ("dynamic", "fixed")
    assert jobs.find(cls.kind) is cls
