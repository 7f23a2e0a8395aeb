"""Each policy's rules, by example and under random schedules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.policies import ASP, BSP, SSP, Quorum
from paceline.policies.core import LATE, LEFT, NO_WEIGHT, OUT_OF_TURN, Arrived, Contribution, Discard, Release, Update
from tests.schedules import Move, Pace


def moves(*names: str) -> st.SearchStrategy[list[Move]]:
    """Schedules of `names`, in which contributions are the most frequent."""
    what = st.sampled_from(["arrive"] * 6 + list(names))
    return st.lists(st.tuples(what, st.integers(0, 4), st.sampled_from([0.0, 1.0, 2.0, 7.0])), max_size=60)


ANY = moves("join", "leave", "pause", "resume")


def played(pace: Pace, workers: int, schedule: list[Move]) -> Pace:
    for worker in range(workers):
        pace.join(worker)
    for move in schedule:
        pace.move(*move)
    return pace


def updates(pace: Pace) -> list[Update]:
    return [action for actions in pace.actions for action in actions if isinstance(action, Update)]


def start(policy: BSP | Quorum | SSP | ASP, workers: int) -> Pace:
    return played(Pace(policy), workers, [])


# bsp ------------------------------------------------------------------------------------------------------------------


def test_bsp_waits_for_all_and_weights_by_examples() -> None:
    pace = start(BSP(), 3)
    assert pace.arrive(2, 1.0) == []
    assert pace.arrive(0, 4.0) == []
    update, *releases = pace.arrive(1, 3.0)
    assert isinstance(update, Update)
    assert [(p.contribution.worker, p.coefficient, p.staleness, p.lam) for p in update.parts] == [
        (0, 0.5, 0, 0.0),
        (1, 0.375, 0, 0.0),
        (2, 0.125, 0, 0.0),
    ]
    assert update.lr_scale == 1.0
    assert releases == [Release(0, 1), Release(1, 1), Release(2, 1)]


def test_bsp_does_not_wait_for_one_that_left_or_has_no_data() -> None:
    pace = start(BSP(), 3)
    pace.arrive(0)
    pace.pause(1)
    assert [type(a) for a in pace.leave(2)] == [Update, Release]
    assert pace.resume(1) == []
    assert pace.arrive(0) == []
    update = pace.arrive(1)[0]
    assert isinstance(update, Update)
    assert [p.staleness for p in update.parts] == [0, 0]


def test_a_contribution_of_no_weight_is_left_out_of_the_divisor() -> None:
    pace = start(BSP(), 2)
    pace.arrive(0, 0.0)
    discard, update, *releases = pace.arrive(1, 5.0)
    assert isinstance(discard, Discard)
    assert discard.reason == NO_WEIGHT
    assert isinstance(update, Update)
    assert [p.coefficient for p in update.parts] == [1.0]
    assert len(releases) == 2


def test_no_update_is_made_of_nothing() -> None:
    pace = start(BSP(), 2)
    pace.arrive(0, 0.0)
    assert [type(a) for a in pace.arrive(1, 0.0)] == [Discard, Discard, Release, Release]
    assert pace.version == 0


@given(ANY)
@settings(max_examples=100, deadline=None)
def test_bsp_equals_ssp_0_and_a_quorum_of_all(schedule: list[Move]) -> None:
    bsp, ssp, quorum = (played(Pace(policy), 3, schedule) for policy in (BSP(), SSP(0), Quorum(99)))
    assert bsp.actions == ssp.actions == quorum.actions


@given(ANY)
@settings(max_examples=100, deadline=None)
def test_bsp_updates_take_every_active_worker_and_no_old_gradient(schedule: list[Move]) -> None:
    pace = Pace(BSP())
    for worker in range(3):
        pace.join(worker)
    for move in schedule:
        active = set(pace.state.active)
        seen = len(pace.actions)
        pace.move(*move)
        for action in (a for actions in pace.actions[seen:] for a in actions):
            if isinstance(action, Update):
                weightless = {k[0] for k in pace.discards if pace.discards[k] == NO_WEIGHT}
                assert {p.contribution.worker for p in action.parts} | weightless >= active & pace.state.active
                assert all(part.staleness == 0 for part in action.parts)


# quorum ---------------------------------------------------------------------------------------------------------------


def test_quorum_takes_the_first_k_and_discards_the_late() -> None:
    pace = start(Quorum(2), 3)
    assert pace.arrive(2) == []
    update, *releases = pace.arrive(0)
    assert isinstance(update, Update)
    assert [p.contribution.worker for p in update.parts] == [0, 2]
    assert releases == [Release(0, 1), Release(2, 1)]
    discard, release = pace.arrive(1)
    assert isinstance(discard, Discard)
    assert (discard.contribution.worker, discard.reason) == (1, LATE)
    assert release == Release(1, 1), "it goes on at once, from the newest version"


def test_quorum_shrinks_to_the_live_workers() -> None:
    pace = start(Quorum(3), 3)
    pace.arrive(0)
    pace.arrive(1)
    assert [type(a) for a in pace.leave(2)] == [Update, Release, Release]
    assert pace.arrive(0) == []
    assert [type(a) for a in pace.pause(1)] == [Update, Release]
    pace.resume(1)
    pace.join(2)
    pace.arrive(0)
    assert pace.arrive(1) == []
    assert [type(a) for a in pace.arrive(2)] == [Update, Release, Release, Release]


def test_a_worker_without_weight_does_not_fill_the_quorum() -> None:
    pace = start(Quorum(2), 3)
    pace.arrive(0, 0.0)
    assert pace.arrive(1) == [], "one gradient is not two"
    discard, update, *releases = pace.arrive(2)
    assert isinstance(discard, Discard)
    assert isinstance(update, Update)
    assert [p.contribution.worker for p in update.parts] == [1, 2]
    assert len(releases) == 3


def test_what_a_lost_worker_gave_is_not_used_by_a_quorum() -> None:
    pace = start(Quorum(2), 3)
    pace.arrive(0)
    (discard,) = pace.leave(0)
    assert isinstance(discard, Discard)
    assert discard.reason == LEFT
    assert pace.arrive(1) == [], "the quorum is of live workers"
    assert isinstance(pace.arrive(2)[0], Update)


@given(st.integers(1, 5), ANY)
@settings(max_examples=150, deadline=None)
def test_a_quorum_is_exactly_k_distinct_live_workers_of_the_present_version(k: int, schedule: list[Move]) -> None:
    pace = Pace(Quorum(k))
    for worker in range(4):
        pace.join(worker)
    for move in schedule:
        seen = len(pace.actions)
        pace.move(*move)
        for action in (a for actions in pace.actions[seen:] for a in actions):
            if isinstance(action, Update):
                assert all(part.staleness == 0 for part in action.parts), "the late are never applied"
                weightless = sum(isinstance(a, Discard) and a.reason == NO_WEIGHT for a in pace.actions[-1])
                assert len(action.parts) == min(k, pace.state.active_count - weightless)


def test_a_quorum_has_a_size() -> None:
    with pytest.raises(JobError, match="quorum k = 0"):
        Quorum(0)


# ssp ------------------------------------------------------------------------------------------------------------------


def test_ssp_lets_a_worker_run_ahead_by_slack_steps() -> None:
    pace = start(SSP(2), 2)
    for _ in range(2):
        assert pace.arrive(0)[-1] == Release(0, pace.version)
    assert pace.arrive(0) == [], "3 steps ahead is too far"
    update, *releases = pace.arrive(1)
    assert isinstance(update, Update)
    assert [(p.contribution.worker, p.staleness) for p in update.parts] == [(0, 0), (1, 2)]
    assert releases == [Release(0, 3), Release(1, 3)]


def test_ssp_goes_on_when_the_slowest_leaves_or_has_no_data() -> None:
    for slowest_goes in ("leave", "pause"):
        pace = start(SSP(1), 2)
        pace.arrive(0)
        assert pace.arrive(0) == []
        assert [type(a) for a in getattr(pace, slowest_goes)(1)] == [Update, Release]


def test_a_worker_joins_and_resumes_at_the_slowest_clock() -> None:
    pace = start(SSP(1), 2)
    pace.pause(1)
    for _ in range(5):
        pace.arrive(0)
    pace.join(2)
    assert pace.state.clocks == {0: 5, 1: 0, 2: 5}
    pace.resume(1)
    assert pace.state.clocks == {0: 5, 1: 5, 2: 5}


def check_ssp(pace: Pace, slack: int) -> None:
    """Every read sees what it must, and nobody who computes is too far ahead."""
    floor = min((pace.state.clocks[w] for w in pace.state.active), default=None)
    for worker, version in pace.reads.items():
        clock = pace.state.clocks[worker]
        assert floor is None or clock - floor <= slack
        for key, step in pace.clock_of.items():
            if step <= clock - slack - 1 and key not in pace.discards:
                assert pace.update_of.get(key, version + 1) <= version, "a read must see all steps that are old enough"


@given(st.integers(0, 3), ANY)
@settings(max_examples=150, deadline=None)
def test_ssp_bound_and_visibility(slack: int, schedule: list[Move]) -> None:
    pace = Pace(SSP(slack))
    for worker in range(3):
        pace.join(worker)
    for move in schedule:
        pace.move(*move)
        check_ssp(pace, slack)


@given(st.integers(0, 3), ANY)
@settings(max_examples=100, deadline=None)
def test_ssp_never_holds_back_one_that_may_go(slack: int, schedule: list[Move]) -> None:
    pace = Pace(SSP(slack))
    for worker in range(3):
        pace.join(worker)
    for move in schedule:
        pace.move(*move)
        floor = min((pace.state.clocks[w] for w in pace.state.active), default=0)
        assert all(pace.state.clocks[worker] - floor > slack for worker in pace.waits)


def test_slack_is_not_negative() -> None:
    with pytest.raises(JobError, match="ssp slack = -1"):
        SSP(-1)


# asp ------------------------------------------------------------------------------------------------------------------


def test_asp_applies_each_contribution_at_once() -> None:
    pace = start(ASP(), 3)
    for worker, staleness in ((0, 0), (0, 0), (1, 2), (2, 3), (1, 1)):
        update, release = pace.arrive(worker, 4.0)
        assert isinstance(update, Update)
        assert [(p.coefficient, p.staleness, p.lam) for p in update.parts] == [(1.0, staleness, 0.0)]
        assert update.lr_scale == 1.0
        assert release == Release(worker, pace.version)


def test_inverse_divides_the_learning_rate_by_the_staleness() -> None:
    pace = start(ASP("inverse"), 2)
    scales = []
    for worker in (0, 0, 0, 1, 0):
        update = pace.arrive(worker)[0]
        assert isinstance(update, Update)
        scales.append(update.lr_scale)
    assert scales == [1.0, 1.0, 1.0, 1 / 3, 1.0]


def test_compensation_goes_with_each_part_and_needs_the_values_that_were_read() -> None:
    pace = start(ASP("compensate", 0.5), 2)
    update = pace.arrive(1)[0]
    assert isinstance(update, Update)
    assert [p.lam for p in update.parts] == [0.5]
    assert ASP("compensate", 0.5).needs_read
    assert not ASP("compensate", 0.0).needs_read
    assert not ASP("inverse").needs_read


@given(ANY)
@settings(max_examples=60, deadline=None)
def test_compensation_by_0_equals_no_compensation(schedule: list[Move]) -> None:
    assert played(Pace(ASP("compensate", 0.0)), 3, schedule).actions == played(Pace(ASP()), 3, schedule).actions


@pytest.mark.parametrize(("rule", "lam", "words"), [("invers", 0.1, "'inverse'"), ("none", -0.5, "lam = -0.5")])
def test_asp_refuses(rule: str, lam: float, words: str) -> None:
    with pytest.raises(JobError, match=words):
        ASP(rule, lam)  # type: ignore[arg-type]


def test_lam_is_a_number() -> None:
    with pytest.raises(JobError):
        ASP("compensate", float("nan"))


# What no policy has to care about ---------------------------------------------------------------------------------


def test_a_stranger_and_a_second_contribution_are_discarded() -> None:
    pace = start(BSP(), 2)
    pace.arrive(0)
    for contribution, reason in (
        (Contribution(7, 0, 0, 0, 1.0), LEFT),
        (Contribution(0, 0, 1, 0, 1.0), OUT_OF_TURN),
    ):
        assert pace.policy.step(pace.state, Arrived(contribution)) == [Discard(contribution, reason)]
    assert isinstance(pace.arrive(1)[0], Update)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_only_a_weight_above_0_counts(weight: float) -> None:
    for policy in (BSP(), Quorum(2), SSP(1), ASP()):
        pace = start(policy, 1)
        assert [type(a) for a in pace.arrive(0, weight)] == [Discard, Release]
