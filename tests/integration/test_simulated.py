"""The simulator against live runs: for the same schedule, the same decisions."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.engines.threads import launch_threads
from paceline.job import Job
from paceline.simulate import Simulation, from_folder, simulate
from tests.helpers import mse, regression, small_model

WORKERS, EXAMPLES, BATCH = 3, 54, 3
MIN_GAP_S = 0.012


def durations(seed: int) -> dict[tuple[int, int], float]:
    """Seconds of computing by (worker, step)."""
    rng = random.Random(seed)
    return {(worker, step): rng.uniform(0.03, 0.2) for worker in range(WORKERS) for step in range(40)}


def simulated(job: Job, seed: int) -> tuple[Simulation, float]:
    """The simulation, and the least time between two contributions of different workers in it."""
    table = durations(seed)
    result = simulate(job, EXAMPLES, BATCH, 1, lambda worker, step: table[worker, step])
    times = sorted({round(t, 9) for t, kind, _ in result.log if kind in ("update", "discard")})
    return result, min((b - a for a, b in itertools.pairwise(times)), default=1.0)


def spaced(job: Job) -> int:
    """The first seed whose decisions keep their distance, so that the noise of a busy machine cannot swap two."""
    return next(seed for seed in range(2000) if simulated(job, seed)[1] >= MIN_GAP_S)


@pytest.mark.parametrize(
    ("when", "assignment"),
    [("bsp", "fixed"), ("quorum:2", "fixed"), ("ssp:1", "fixed"), ("asp:inverse", "dynamic"), ("asp:inverse", "fixed")],
)
def test_the_live_run_decides_as_the_simulation_does(tmp_path: Path, when: str, assignment: str) -> None:
    """With batches dealt to whoever asks, workers that are released at one moment race for the next batch, so that
    schedule is fixed only under asp."""
    job = Job(workers=WORKERS, servers=2, when=when, assignment=assignment, piece_bytes=100)  # type: ignore[arg-type]
    seed = spaced(job)
    table = durations(seed)

    def train(worker: Any) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(*regression(EXAMPLES)), batch_size=BATCH)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        released_s = time.perf_counter()
        for step, (x, y) in enumerate(loader):
            mse(model, x, y).backward()
            time.sleep(max(0.0, released_s + table[worker.rank, step] - time.perf_counter()))
            optimizer.step()
            released_s = time.perf_counter()
            optimizer.zero_grad()

    run = launch_threads(train, job, runs=str(tmp_path))
    assert from_folder(run.folder) == simulated(job, seed)[0].actions()
