"""Simulated runs against closed forms, and against each other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import job as jobs
from paceline.errors import JobError, PacelineError, TimedOut
from paceline.job import Job
from paceline.simulate import Event, Faults, Join, Kill, Pause, Simulation, from_folder, simulate
from tests.schedules import POLICIES

POLICY_NAMES = ["bsp", "quorum:2", "ssp:2", "asp"]


def exponential(mean_s: float, seed: int) -> Callable[[int, int], float]:
    rng = random.Random(seed)
    return lambda worker, step: rng.expovariate(1 / mean_s)


def uneven(seed: int) -> Callable[[int, int], float]:
    """A time for each (worker, step), whatever the order in which they are asked for."""
    return lambda worker, step: random.Random(f"{seed} {worker} {step}").uniform(0.5, 2.0)


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


@cache
def quorum_step_s(fresh: int, late: int, needed: int) -> float:
    """The expected time until `needed` of `fresh` workers have finished, when the times are exponential with mean 1 and
    each of the `late` ones begins afresh when it is through with what it computes in vain."""
    if needed == 0:
        return 0.0
    running = fresh + late
    after = fresh * quorum_step_s(fresh - 1, late, needed - 1) if fresh else 0.0
    after += late * quorum_step_s(fresh + 1, late - 1, needed) if late else 0.0
    return (1 + after) / running


# Closed forms ---------------------------------------------------------------------------------------------------------


def test_a_bsp_step_of_exponential_workers_takes_the_harmonic_mean() -> None:
    workers, steps, mean_s = 8, 1500, 2.0
    run = simulate(Job(workers=workers), workers * steps, 1, 1, exponential(mean_s, seed=1))
    assert run.updates == steps
    deviation_s = mean_s * sum(1 / i**2 for i in range(1, workers + 1)) ** 0.5 / steps**0.5
    assert run.seconds / steps == pytest.approx(mean_s * harmonic(workers), abs=4 * deviation_s)


@pytest.mark.parametrize(("workers", "k"), [(6, 6), (6, 5), (6, 3), (6, 1)])
def test_a_quorum_step_of_exponential_workers(workers: int, k: int) -> None:
    steps = 1500
    run = simulate(jobs.job(workers=workers, when=f"quorum:{k}"), k * steps, 1, 1, exponential(1.0, seed=2))
    expected_s = quorum_step_s(k, workers - k, k)
    assert run.seconds / run.updates == pytest.approx(expected_s, rel=0.08)
    stopped_at_once_s = harmonic(workers) - harmonic(workers - k)
    assert expected_s >= stopped_at_once_s - 1e-12, "a late worker is let go when it is through, not before"
    if k == workers:
        assert expected_s == pytest.approx(stopped_at_once_s)


def test_asp_is_as_fast_as_its_workers_together() -> None:
    job = jobs.job(workers=4, when="asp", slow={3: 5.0})
    run = simulate(job, 3200, 1, 1, 1.0)
    assert run.seconds == pytest.approx(3200 / (3 + 1 / 5), rel=0.01)
    assert run.examples == 3200


@pytest.mark.parametrize("slack", [0, 1, 4])
def test_ssp_keeps_pace_with_the_slowest_in_the_long_run(slack: int) -> None:
    job = jobs.job(workers=3, when=f"ssp:{slack}", slow={2: 4.0}, assignment="fixed")
    run = simulate(job, 300, 1, 1, 1.0)
    assert run.seconds == 400.0
    assert max(run.staleness) <= 2 * slack + 2, "while the slowest does one step, the others do slack + 1 each at most"
    assert run.wait_s[2] == 0.0


def test_slack_absorbs_a_delay_that_passes() -> None:
    def late_once(worker: int, step: int) -> float:
        return 4.0 if step % 20 == 5 * worker else 1.0

    seconds = {}
    for when in ("bsp", "ssp:6"):
        seconds[when] = simulate(jobs.job(workers=4, when=when, assignment="fixed"), 400, 1, 1, late_once).seconds
    assert seconds == {"bsp": 100 + 3 * 20, "ssp:6": 100 + 3 * 5}, "each waits for all delays, or for its own"


@pytest.mark.parametrize("servers", [1, 2])
def test_transfers(servers: int) -> None:
    """A step pushes and pulls all parameters once; each server carries its share, both ways take their latency."""
    steps, parameters_bytes, bits_per_s, latency_s = 10, 80_000_000, 1e9, 0.01
    run = simulate(
        Job(workers=1, servers=servers), steps, 1, 1, 0.0, parameters_bytes, bits_per_s, latency_s,
    )  # fmt: skip
    share_s = parameters_bytes * 8 / bits_per_s / servers
    beyond = servers > 1  # the order from server 0 to server 1, and its word that all is staged
    latencies = 1 + beyond + steps * (2 + 2 + 2 * beyond) + 2 + 2 + (2 + beyond)
    assert run.seconds == pytest.approx((1 + 2 * steps + 1) * share_s + latencies * latency_s)
    assert run.wait_s[0] == pytest.approx(run.seconds)


def test_the_transfers_of_a_link_queue_and_those_of_two_do_not() -> None:
    """Server 0 sends to each of its workers over a link of its own."""
    one, four = (
        simulate(Job(workers=n), 10 * n, 1, 1, 0.0, 8_000_000, 1e9).seconds for n in (1, 4)
    )  # fmt: skip
    assert one == pytest.approx(four)


# Equalities -----------------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 999),
    workers=st.integers(1, 5),
    examples=st.integers(1, 40),
    batch=st.integers(1, 4),
    epochs=st.integers(1, 2),
    servers=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_bsp_ssp_0_and_quorum_n_are_one(
    seed: int, workers: int, examples: int, batch: int, epochs: int, servers: int
) -> None:
    runs = [
        simulate(
            jobs.job(workers=workers, when=when, servers=servers, assignment="fixed"),
            examples,
            batch,
            epochs,
            uneven(seed),
            parameters_bytes=100,
            bandwidth_bits_per_s=1e4,
            latency_s=0.01,
        )
        for when in ("bsp", "ssp:0", f"quorum:{workers}")
    ]
    assert runs[0].actions() == runs[1].actions() == runs[2].actions()
    assert runs[0].seconds == runs[1].seconds == runs[2].seconds
    assert runs[0].examples == epochs * examples


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_worker_is_the_plain_loop(policy: object) -> None:
    run = simulate(jobs.job(workers=1, when=policy), 7, 2, 2, 1.0)
    steps = [("update", ((0, step, float(weight), 0),)) for step, weight in enumerate([2, 2, 2, 1] * 2)]
    assert run.actions() == [("join", 0), *steps[:4], ("epoch", 0, 7, 0), *steps[4:], ("epoch", 1, 7, 0), ("leave", 0)]
    assert run.seconds == 8.0


def test_the_number_of_servers_changes_time_and_nothing_else() -> None:
    runs = [simulate(Job(workers=3, servers=s), 30, 2, 1, uneven(5), 10**6, 1e9, 0.001) for s in (1, 2, 4)]
    assert runs[0].actions() == runs[1].actions() == runs[2].actions()
    assert runs[0].seconds != runs[1].seconds


@pytest.mark.parametrize("when", POLICY_NAMES)
def test_accumulation_takes_several_batches_a_step(when: str) -> None:
    run = simulate(jobs.job(workers=2, when=when, accumulate=3, assignment="fixed"), 16, 1, 1, 1.0)
    weights = [part[2] for action in run.actions() if action[0] == "update" for part in action[1]]
    assert sorted(weights) == [2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    assert run.compute_s == {0: 8.0, 1: 8.0}


# Faults ---------------------------------------------------------------------------------------------------------------


def all_used(run: Simulation, examples: int, epochs: int) -> bool:
    ranges = [tuple(r) for _, kind, fields in run.log if kind == "update" for r in fields["ranges"]]
    return sorted(i for start, stop in ranges for i in range(start, stop)) == sorted([*range(examples)] * epochs)


@pytest.mark.parametrize("when", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(6))
def test_every_example_is_used_whatever_happens(when: str, seed: int) -> None:
    job = jobs.job(workers=4, servers=2, when=when, on_loss="continue", piece_bytes=40)
    events: list[Event] = [
        Faults(seed, delay_s=0.5, duplicate=0.3, kill=0.05),
        Join(5, 8.0),
        Pause(1, 3.0, 2.5),
        Kill(2, 6.0),
    ]
    runs = [simulate(job, 41, 2, 2, uneven(seed), 100, 1e4, 0.05, events) for _ in range(2)]
    assert runs[0] == runs[1], "a seed is a schedule"
    assert not runs[0].error
    assert all_used(runs[0], 41, 2)
    assert any(action[0] == "leave" for action in runs[0].actions())


def test_a_lost_worker_ends_the_run_by_name_or_does_not() -> None:
    events = [Kill(1, 2.5)]
    run = simulate(Job(workers=3), 30, 1, 1, 1.0, events=events)
    assert run.error == "WorkerLost"
    assert "worker 1" in run.what
    assert (run.seconds, run.compute_s[1], run.wait_s[1]) == (2.5, 2.5, 0.0)
    run = simulate(Job(workers=3, on_loss="continue"), 30, 1, 1, 1.0, events=events)
    assert not run.error
    assert all_used(run, 30, 1)
    assert run.seconds == 14.0, "2 steps of 3, one that was waited for in vain, 12 of 2"


def test_a_worker_that_comes_back_goes_on_from_the_newest_version() -> None:
    events: list[Event] = [Kill(1, 2.5), Join(1, 6.5)]
    run = simulate(Job(workers=2, on_loss="restart"), 30, 1, 1, 1.0, events=events)
    assert all_used(run, 30, 1)
    assert [a for a in run.actions() if a[0] in ("join", "leave")][2:4] == [("leave", 1), ("join", 1)]
    assert max(run.staleness) == 0


def test_the_only_worker_may_come_back_and_the_data_waits_for_it() -> None:
    job = Job(workers=1, on_loss="restart")
    assert all_used(simulate(job, 9, 1, 1, 1.0, events=[Kill(0, 2.5), Join(0, 6.0)]), 9, 1)
    with pytest.raises(TimedOut, match="stands still"):
        simulate(job, 9, 1, 1, 1.0, events=[Kill(0, 2.5)])


def test_a_pause_delays_and_a_long_one_is_a_loss() -> None:
    job = Job(workers=2, on_loss="continue", lease_s=10.0)
    assert simulate(job, 10, 1, 1, 1.0).seconds == 5.0
    assert simulate(job, 10, 1, 1, 1.0, events=[Pause(1, 0.5, 6.0)]).seconds == 11.0
    lost = simulate(job, 10, 1, 1, 1.0, events=[Pause(1, 0.5, 60.0)])
    assert next(fields["reason"] for _, kind, fields in lost.log if kind == "leave").startswith("silent for")
    assert all_used(lost, 10, 1)
    assert lost.seconds < 25.0


def test_bsp_waits_for_a_pause_and_quorum_does_not() -> None:
    events = [Pause(1, 0.5, 6.0)]
    seconds = {
        when: simulate(jobs.job(workers=4, when=when), 40, 1, 1, 1.0, events=events).seconds
        for when in ("bsp", "quorum:3")
    }
    assert seconds == {"bsp": 16.0, "quorum:3": 15.0}, "14 steps of 3, and one for the batch that came too late"


# Arguments and forms --------------------------------------------------------------------------------------------------


def test_compute_times_are_one_or_one_each_or_a_function() -> None:
    runs = [simulate(Job(workers=2), 4, 1, 1, times) for times in (2.0, [2.0, 2.0], lambda worker, step: 2.0)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0].seconds == 4.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"examples": 0},
        {"batch": 0},
        {"epochs": 0},
        {"parameters_bytes": -1},
        {"bandwidth_bits_per_s": 0.0},
        {"latency_s": -1.0},
        {"compute_s": [1.0]},
    ],
)
def test_numbers_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(JobError, match=next(iter(wrong))):
        simulate(Job(workers=2), **{"examples": 4, "batch": 1, **wrong})  # type: ignore[arg-type]


def test_a_runs_events_read_back_as_its_actions(tmp_path: Path) -> None:
    run = simulate(jobs.job(workers=3, when="quorum:2"), 20, 1, 2, uneven(3))
    (tmp_path / "events").mkdir()
    lines = [{"t": 0.0, "kind": "start", "index": 0}]
    lines += [{"t": 1.7e9 + time_s, "kind": kind, **fields} for time_s, kind, fields in run.log]
    (tmp_path / "events" / "server-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert from_folder(tmp_path) == run.actions()
    assert {action[0] for action in run.actions()} == {"join", "update", "discard", "epoch", "leave"}
    with pytest.raises(PacelineError):
        from_folder(tmp_path / "nowhere")


def test_it_does_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, paceline.simulate; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
