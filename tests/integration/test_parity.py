"""Whole runs against one process on the whole batch: what must be equal is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.engines.threads import launch_threads
from paceline.policies import ASP, BSP, SSP, Policy, Quorum
from tests.helpers import OPTIMIZERS, difference, mse, regression, small_model, values

STEPS = 6
UNEVEN = (7, 5, 4)
"""Batch sizes of three workers."""


def shares(x: torch.Tensor, sizes: tuple[int, ...] = UNEVEN) -> list[list[torch.Tensor]]:
    """Each worker's batches: step s takes the next sum(sizes) examples."""
    cut = [x[s * sum(sizes) : (s + 1) * sum(sizes)].split(sizes) for s in range(STEPS)]
    return [[cut[s][k] for s in range(STEPS)] for k in range(len(sizes))]


def one_process(
    optimizer: str, dtype: torch.dtype, scheduler: bool = True, clip: float | None = None
) -> dict[str, Any]:
    """The plain loop on the whole batches."""
    x, y = regression(dtype=dtype)
    model = small_model(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    total = sum(UNEVEN)
    for s in range(STEPS):
        opt.zero_grad()
        mse(model, x[s * total : (s + 1) * total], y[s * total : (s + 1) * total]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        if scheduler:
            sched.step()
    return values(model)


def uneven_train(worker: Any, *, optimizer: str, dtype: torch.dtype, clip: float | None = None) -> None:
    """Each worker brings its own uneven batches."""
    x, y = regression(dtype=dtype)
    batches = list(zip(shares(x)[worker.rank], shares(y)[worker.rank], strict=True))
    model = small_model(dtype, seed=worker.rank)
    opt = OPTIMIZERS[optimizer](model.parameters())
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    model, opt, batches = worker.prepare(model, opt, batches, shard=False)
    for bx, by in batches:
        opt.zero_grad()
        mse(model, bx, by).backward()
        if clip is not None:
            worker.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        sched.step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_bsp_with_uneven_batches_over_two_servers_equals_one_process(
    tmp_path: Path, optimizer: str, dtype: torch.dtype, tolerance: float
) -> None:
    train = functools.partial(uneven_train, optimizer=optimizer, dtype=dtype)
    run = launch_threads(train, workers=3, servers=2, when=BSP(), runs=str(tmp_path), piece_bytes=100)
    assert difference(run.weights(), one_process(optimizer, dtype)) <= tolerance


@pytest.mark.parametrize("when", [SSP(slack=0), Quorum(k=3), Quorum(k=99)])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_policies_that_wait_for_all_equal_bsp(tmp_path: Path, when: Policy, optimizer: str) -> None:
    train = functools.partial(uneven_train, optimizer=optimizer, dtype=torch.float64)
    run = launch_threads(train, workers=3, servers=2, when=when, runs=str(tmp_path), piece_bytes=64)
    assert difference(run.weights(), one_process(optimizer, torch.float64)) <= 1e-12


def test_clipping_equals_clipping_the_averaged_gradient(tmp_path: Path) -> None:
    clip = 0.05
    train = functools.partial(uneven_train, optimizer="momentum", dtype=torch.float64, clip=clip)
    run = launch_threads(train, workers=3, servers=2, runs=str(tmp_path), piece_bytes=64)
    clipped = one_process("momentum", torch.float64, clip=clip)
    assert difference(run.weights(), clipped) <= 1e-12
    assert difference(clipped, one_process("momentum", torch.float64)) > 1e-4, "the test must clip"


@pytest.mark.parametrize("when", [BSP(), Quorum(k=2), SSP(slack=2), ASP(), ASP("inverse"), ASP("compensate", 0.5)])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_one_worker_is_the_plain_optimizer(tmp_path: Path, when: Policy, optimizer: str) -> None:
    def train(worker: Any) -> None:
        x, y = regression()
        model = small_model()
        opt = OPTIMIZERS[optimizer](model.parameters())
        batches = list(zip(x.split(16), y.split(16), strict=True))
        model, opt, batches = worker.prepare(model, opt, batches)
        for bx, by in batches:
            mse(model, bx, by).backward()
            opt.step()
            opt.zero_grad()

    run = launch_threads(train, workers=1, servers=2, when=when, runs=str(tmp_path), piece_bytes=64)
    assert difference(run.weights(), one_process(optimizer, torch.float64, scheduler=False)) <= 1e-12
