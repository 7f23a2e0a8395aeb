"""Train functions that tests start in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import mse, regression, small_model


def dataset() -> TensorDataset:
    return TensorDataset(*regression(96))


def fit(worker: Any) -> None:
    """Plain training on shared data; `sleep_s` seconds a batch, for `epochs`."""
    model = small_model(seed=worker.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(dataset(), batch_size=worker.args.get("batch", 4), shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for _ in range(worker.args.get("epochs", 1)):
        for x, y in loader:
            time.sleep(worker.args.get("sleep_s", 0.0))
            loss = mse(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            worker.log(loss=loss)


def die(worker: Any) -> None:
    """As `fit`, but one worker kills itself in the middle of its `at`-th step, the first time it lives."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset(), batch_size=4, shuffle=True)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    marker = worker.args["marker"]
    for step, (x, y) in enumerate(loader):
        time.sleep(0.02)
        if worker.rank == 1 and step == 3 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), getattr(signal, worker.args.get("signal", "SIGKILL")))
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def kill_server(worker: Any) -> None:
    """Worker 0 kills a server process in the middle of training."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset(), batch_size=1)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        time.sleep(0.02)
        if worker.rank == 0 and step == 3:
            os.kill(_server(worker), signal.SIGKILL)
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _server(worker: Any) -> int:
    import json

    path = f"{worker.job.runs}/{worker.job.name}/events/launcher.jsonl"
    with open(path) as file:
        events = [json.loads(line) for line in file]
    return int(
        next(e["pid"] for e in events if e["kind"] == "spawn" and e["name"] == f"server-{worker.args['server']}")
    )


def long_evaluation(worker: Any) -> None:
    """Worker 0 evaluates for much longer than the lease."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset(), batch_size=16)
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if worker.rank == 0 and step == 1:
            with worker.evaluate():
                time.sleep(worker.args["seconds"])


def raises(worker: Any) -> None:
    """A bug in the user's script, on one worker, before or after prepare."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset(), batch_size=4)
    if worker.args["when"] == "before" and worker.rank == 1:
        raise ValueError("a bug")
    model, optimizer, loader = worker.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        if worker.rank == 1 and step == 2:
            raise ValueError("a bug")
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_arguments(worker: Any, other: Any) -> None:
    """Not callable with one worker."""


def raises_under_asp(worker: Any) -> None:
    """A bug that shows under one policy."""
    fit(worker)
    if worker.job.when.kind == "asp":
        raise ValueError("a bug")
