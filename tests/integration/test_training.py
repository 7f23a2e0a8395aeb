"""The worker's face in whole runs: data, accumulation, buffers, evaluation, reproducibility."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.engines.threads import launch_threads
from paceline.watch.events import read
from tests.helpers import OPTIMIZERS, difference, mse, regression, small_model, values


def updates(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read(folder / "events" / "server-0.jsonl") if e["kind"] == "update"]


def test_uneven_data_finishes_and_equals_the_weighted_whole(tmp_path: Path) -> None:
    """Workers with 7, 5 and 0 batches, of different sizes: each step weighs those that still have data."""
    counts, sizes = (7, 5, 0), (4, 3, 5)
    x, y = regression(96)

    def mine(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        start = sum(c * s for c, s in zip(counts[:rank], sizes[:rank], strict=True))
        stop = start + counts[rank] * sizes[rank]
        return (
            list(zip(x[start:stop].split(sizes[rank]), y[start:stop].split(sizes[rank]), strict=True))
            if stop > start
            else []
        )

    def train(worker: Any) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer, batches = worker.prepare(model, optimizer, mine(worker.rank), shard=False)
        for _ in range(2):
            for bx, by in batches:
                mse(model, bx, by).backward()
                optimizer.step()
                optimizer.zero_grad()

    run = launch_threads(train, workers=3, servers=2, runs=str(tmp_path))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for step in range(max(counts)):
            here = [mine(rank)[step] for rank in range(3) if step < counts[rank]]
            mse(model, torch.cat([bx for bx, _ in here]), torch.cat([by for _, by in here])).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(updates(run.folder)) == 2 * max(counts)
    assert difference(run.weights(), values(model)) <= 1e-12


@pytest.mark.parametrize("when", ["bsp", "quorum:2", "ssp:1", "asp", "asp:inverse", "asp:compensate"])
@pytest.mark.parametrize("assignment", ["dynamic", "fixed"])
def test_every_example_of_an_epoch_is_used_once(tmp_path: Path, when: str, assignment: str) -> None:
    def train(worker: Any) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(*regression(53)), batch_size=4, shuffle=True)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        for _ in range(3):
            for bx, by in loader:
                mse(model, bx, by).backward()
                optimizer.step()
                optimizer.zero_grad()

    run = launch_threads(train, workers=3, when=when, assignment=assignment, runs=str(tmp_path))
    used = Counter(i for e in updates(run.folder) for start, stop in e["ranges"] for i in range(start, stop))
    assert used == Counter(dict.fromkeys(range(53), 3))
    epochs = [e for e in read(run.folder / "events" / "server-0.jsonl") if e["kind"] == "epoch"]
    assert [(e["epoch"], e["used"], e["skipped"]) for e in epochs] == [(0, 53, 0), (1, 53, 0), (2, 53, 0)]


def test_the_shuffle_covers_the_data_and_differs_by_epoch(tmp_path: Path) -> None:
    seen: list[list[int]] = [[], []]
    lock = threading.Lock()

    def train(worker: Any) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = DataLoader(TensorDataset(torch.arange(40.0)[:, None]), batch_size=4, shuffle=True, num_workers=0)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        assert len(loader) == 5
        for epoch in range(2):
            for (x,) in loader:
                with lock:
                    seen[epoch] += x[:, 0].int().tolist()
                model(x).sum().backward()
                optimizer.step()

    launch_threads(train, workers=2, runs=str(tmp_path))
    assert [sorted(s) for s in seen] == [list(range(40))] * 2
    assert seen[0] != seen[1]
    assert seen[0] != sorted(seen[0])


def test_leaving_an_epoch_early_hangs_nobody(tmp_path: Path) -> None:
    def train(worker: Any) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(*regression(96)), batch_size=4)
        model, optimizer, loader = worker.prepare(model, optimizer, loader)
        for _ in range(3):
            for step, (bx, by) in enumerate(loader):
                mse(model, bx, by).backward()
                if worker.rank == 0 and step == 1:
                    break
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    break

    for when in ("bsp", "ssp:1"):
        run = launch_threads(train, workers=3, when=when, runs=str(tmp_path))
        assert run.weights()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_accumulation_equals_the_big_batch(tmp_path: Path, dtype: torch.dtype) -> None:
    """Three uneven micro-batches a window, the last window of an epoch shorter; a scheduler moves once a window."""
    x, y = regression(70, dtype)
    sizes = [6, 4, 2, 5, 5, 5, 3, 1]

    def train(worker: Any) -> None:
        model = small_model(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        batches = [*zip(x[:31].split(sizes), y[:31].split(sizes), strict=True)]
        batches = [batches[i] for i in range(len(sizes))]
        model, optimizer, batches, scheduler = worker.prepare(model, optimizer, batches, scheduler, shard=False)
        for bx, by in batches:
            with worker.accumulate():
                mse(model, bx, by).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    run = launch_threads(train, workers=1, accumulate=3, runs=str(tmp_path))
    model = small_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for start, stop in ((0, 12), (12, 27), (27, 31)):
        mse(model, x[start:stop], y[start:stop]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert difference(run.weights(), values(model)) <= (1e-12 if dtype == torch.float64 else 1e-6)
    assert [e["parts"][0][2] for e in updates(run.folder)] == [12, 15, 4]


def test_token_weights_count_instead_of_examples(tmp_path: Path) -> None:
    x, y = regression(8)

    def train(worker: Any) -> None:
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        part = slice(0, 2) if worker.rank == 0 else slice(2, 8)
        model, optimizer, batches = worker.prepare(model, optimizer, [(x[part], y[part])], shard=False)
        for bx, by in batches:
            worker.weight(3 if worker.rank == 0 else 1)
            mse(model, bx, by).backward()
            optimizer.step()

    run = launch_threads(train, workers=2, runs=str(tmp_path))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (0.75 * mse(model, x[:2], y[:2]) + 0.25 * mse(model, x[2:], y[2:])).backward()
    optimizer.step()
    assert difference(run.weights(), values(model)) <= 1e-12


def test_bsp_is_bitwise_reproducible_and_replicas_are_equal(tmp_path: Path) -> None:
    held: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def fit(round_: int) -> dict[str, torch.Tensor]:
        def train(worker: Any) -> None:
            model = small_model(torch.float32, seed=worker.rank)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            loader = DataLoader(TensorDataset(*regression(60, torch.float32)), batch_size=7, shuffle=True)
            model, optimizer, loader = worker.prepare(model, optimizer, loader)
            for _ in range(2):
                for bx, by in loader:
                    mse(model, bx, by).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with worker.evaluate():
                held[round_, worker.rank] = values(model)

        return launch_threads(train, workers=3, servers=2, runs=str(tmp_path), seed=5).weights()

    first, second = fit(0), fit(1)
    for name, value in first.items():
        assert torch.equal(value, second[name])
        for rank in range(3):
            assert torch.equal(value, held[0, rank][name])


def test_buffers_follow_the_one_rule(tmp_path: Path) -> None:
    """Floating buffers become the contributors' weighted average, integer ones those of the furthest worker."""
    means: dict[int, torch.Tensor] = {}

    def train(worker: Any) -> None:
        model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        x, y = regression(16)
        part = slice(0, 4) if worker.rank == 0 else slice(4, 16)
        means[worker.rank] = 0.1 * x[part].mean(0)
        model, optimizer, batches = worker.prepare(model, optimizer, [(x[part], y[part])], shard=False)
        for bx, by in batches:
            mse(model, bx, by).backward()
            optimizer.step()

    run = launch_threads(train, workers=2, runs=str(tmp_path))
    expected = 0.25 * means[0] + 0.75 * means[1]
    assert torch.allclose(run.weights()["0.running_mean"], expected, atol=1e-15)
    assert run.weights()["0.num_batches_tracked"].item() == 1


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(20.0).split(1))


def test_iterable_datasets_are_dealt_by_batches(tmp_path: Path) -> None:
    seen: list[float] = []

    def train(worker: Any) -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = worker.prepare(model, optimizer, DataLoader(Stream(), batch_size=3))
        for x in loader:
            seen.extend(x[:, 0].tolist())
            model(x).sum().backward()
            optimizer.step()

    launch_threads(train, workers=2, when="asp", runs=str(tmp_path))
    assert sorted(seen) == list(range(20))


def test_frozen_missing_and_tied_parameters(tmp_path: Path) -> None:
    """A parameter without a gradient stalls nothing; a frozen one is broadcast; a tied one is trained once."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.tied = self.used

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.used(x)) + self.frozen

    start: dict[int, dict[str, torch.Tensor]] = {}

    def train(worker: Any) -> None:
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, batches = worker.prepare(model, optimizer, [torch.ones(2, 3)] * 6)
        start[worker.rank] = values(model)
        for x in batches:
            model(x).square().mean().backward()
            assert worker.without_gradient() == ["unused.weight", "unused.bias"]
            optimizer.step()
            optimizer.zero_grad()

    run = launch_threads(train, workers=2, servers=2, runs=str(tmp_path))
    end = run.weights()
    assert difference(start[0], start[1]) == 0
    assert torch.equal(end["unused.weight"], start[0]["unused.weight"])
    assert torch.equal(end["frozen"], start[0]["frozen"])
    assert not torch.equal(end.get("used.weight", end.get("tied.weight")), start[0]["used.weight"])


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_piece_size_servers_and_link_change_no_value(tmp_path: Path, optimizer: str) -> None:
    def train(worker: Any) -> None:
        model = small_model(torch.float32)
        opt = OPTIMIZERS[optimizer](model.parameters())
        loader = DataLoader(TensorDataset(*regression(48, torch.float32)), batch_size=4)
        model, opt, loader = worker.prepare(model, opt, loader)
        for bx, by in loader:
            mse(model, bx, by).backward()
            opt.step()
            opt.zero_grad()

    one = launch_threads(train, workers=2, servers=1, runs=str(tmp_path)).weights()
    for servers, piece_bytes in ((2, 40), (3, 4), (4, 4_000_000)):
        other = launch_threads(train, workers=2, servers=servers, piece_bytes=piece_bytes, runs=str(tmp_path)).weights()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_half_precision_parameters(tmp_path: Path) -> None:
    def train(worker: Any) -> None:
        model = small_model(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = regression(16, torch.bfloat16)
        model, optimizer, batches = worker.prepare(model, optimizer, [(x, y)] * 4)
        for bx, by in batches:
            mse(model, bx, by).backward()
            optimizer.step()
            optimizer.zero_grad()

    run = launch_threads(train, workers=2, runs=str(tmp_path))
    assert run.weights()["0.weight"].dtype == torch.bfloat16
