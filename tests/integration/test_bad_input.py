"""A user's mistakes: one line, the value and a fix, and before any process starts where that is possible."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import cli
from paceline.engines.threads import launch_threads
from paceline.errors import (
    AddressError,
    DataError,
    JobError,
    ModelError,
    NonFiniteError,
    OptimizerError,
    PacelineError,
    ScriptError,
)
from tests.helpers import mse, regression, small_model
from tests.integration import trains

SCRIPT = str(Path(trains.__file__))


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a process is started."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", fail)


def command(*argv: str) -> tuple[int, str]:
    """Exit code and error text of a command line."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = cli.run(argv)
    return code, err.getvalue()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", f"{SCRIPT}:fit", "--wrokers", "2"], "did you mean 'workers'"),
        (["train", f"{SCRIPT}:fit", "--when", "qourum:2"], "did you mean 'quorum'"),
        (["train", f"{SCRIPT}:fit", "--when.kind", "ssp", "--when.slak", "2"], "did you mean 'slack'"),
        (["train", f"{SCRIPT}:fit", "--when", "quorum:0"], "k must be 1 or more"),
        (["train", f"{SCRIPT}:fit", "--when", "ssp:-1"], "slack must be 0"),
        (["train", f"{SCRIPT}:fit", "--workers", "two"], "Expected `int`"),
        (["train", f"{SCRIPT}:fit", "--workers", "0"], "workers must be 1 or more"),
        (["train", f"{SCRIPT}:fit", "--workers"], "--workers has no value"),
        (["train", f"{SCRIPT}:fit", "--on-loss", "contine"], "did you mean 'continue'"),
        (["train", f"{SCRIPT}:fitt"], "did you mean 'fit'"),
        (["train", f"{SCRIPT}:two_arguments"], "cannot be called with one worker"),
        (["train", f"{SCRIPT[:-4]}.py:fit"], "did you mean"),
        (["train", "no.such.module:fit"], "no module"),
        (["train", "missing.toml"], "no job file"),
        (["compare", f"{SCRIPT}:fit", "--when", "bsp"], "give two or more"),
        (["compare", f"{SCRIPT}:fit", "--when", "bsp", "--when", "bsp"], "give each policy once"),
        (["trian", "x"], "trian"),
    ],
)
def test_the_command_line_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str) -> None:
    refuse(monkeypatch)
    code, text = command(*argv)
    assert code == 2
    assert said in text.replace("\n", " ")


@pytest.mark.parametrize("toml", ["workers = ", 'worker = 2\nscript = "x.py:f"', "[when]\nslack = 2\n", "when = 3"])
def test_a_wrong_job_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str) -> None:
    refuse(monkeypatch)
    (tmp_path / "job.toml").write_text(toml)
    code, text = command("train", str(tmp_path / "job.toml"))
    assert (code, "fix:" in text) == (2, True)


def test_a_run_folder_that_exists_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    (tmp_path / "mine").mkdir()
    with pytest.raises(JobError, match=r"mine' exists"):
        paceline.launch(trains.fit, name="mine", runs=str(tmp_path), progress=False)


def test_a_port_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=rf"{port}.*EADDRINUSE|EADDRINUSE.*{port}"):
            paceline.launch(trains.fit, link="tcp", port=port, runs=str(tmp_path), progress=False)
    assert not list(tmp_path.iterdir())


def test_a_function_that_other_processes_cannot_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch)
    with pytest.raises(ScriptError, match="top level"):
        paceline.launch(lambda worker: None)
    with pytest.raises(ScriptError, match="one worker"):
        paceline.launch(trains.two_arguments)  # type: ignore[arg-type]


def test_launch_without_a_main_guard_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PACELINE_LAUNCHED", "1")
    with pytest.raises(ScriptError, match="__main__"):
        paceline.launch(trains.fit)


def parts(worker: Any, **changed: Any) -> tuple[Any, ...]:
    model = changed.get("model", small_model())
    optimizer = changed.get("optimizer", lambda p: torch.optim.SGD(p, lr=0.1))(model.parameters())
    loader = changed.get("loader", DataLoader(TensorDataset(*regression()), batch_size=8))
    return worker.prepare(model, optimizer, loader)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "said", "change"),
    [
        (OptimizerError, "LBFGS", lambda rank: {"optimizer": torch.optim.LBFGS}),
        (
            ModelError,
            r"worker \d's model .* 0\.weight",
            lambda rank: {"model": nn.Sequential(nn.Linear(5, 2 + rank)).double()},
        ),
        (
            OptimizerError,
            "not in the model",
            lambda rank: {"optimizer": lambda p: torch.optim.SGD(small_model().parameters())},
        ),
        (DataError, "3 examples for 4 workers", lambda rank: {"loader": DataLoader(TensorDataset(torch.zeros(3)))}),
        (DataError, "examples in batches", lambda rank: {"loader": DataLoader(TensorDataset(torch.zeros(30 + rank)))}),
        (
            DataError,
            "own sampling",
            lambda rank: {
                "loader": DataLoader(
                    TensorDataset(torch.zeros(9)), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 9, 9)
                )
            },
        ),
    ],
)
def test_what_cannot_be_prepared_ends_the_run_by_name(
    tmp_path: Path, error: type[PacelineError], said: str, change: Any
) -> None:
    with pytest.raises(error, match=said):
        launch_threads(lambda worker: parts(worker, **change(worker.rank)), workers=4, runs=str(tmp_path))


def poisoned(worker: Any) -> None:
    """Worker 1's third batch has a NaN in it."""
    model, optimizer, loader = parts(worker)
    for step, (x, y) in enumerate(loader):
        if worker.rank == 1 and step == 2:
            y = y * float("nan")
        mse(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_nan_stops_the_run_and_names_the_parameter(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"worker 1: the gradient of 0\.weight is not finite at step 2"):
        launch_threads(poisoned, workers=2, runs=str(tmp_path))


@pytest.mark.parametrize("when", ["bsp", "quorum:2", "ssp:1", "asp"])
def test_a_nan_can_be_skipped_and_is_reported(tmp_path: Path, when: str) -> None:
    run = launch_threads(poisoned, workers=2, when=when, runs=str(tmp_path), on_nan="skip", assignment="fixed")
    assert all(bool(value.isfinite().all()) for value in run.weights().values())
    text = (run.folder / "events" / "server-0.jsonl").read_text()
    assert '"skipped":8' in text.replace(" ", "")
    assert '"no weight"' in text


def test_a_parameter_replaced_after_prepare_is_refused(tmp_path: Path) -> None:
    def train(worker: Any) -> None:
        model, optimizer, loader = parts(worker)
        for x, y in loader:
            mse(model, x, y).backward()
            model[0].weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
            optimizer.step()

    with pytest.raises(ModelError, match=r"0\.weight"):
        launch_threads(train, workers=2, runs=str(tmp_path))


def test_importing_paceline_is_quick_and_leaves_torch_alone() -> None:
    code = "import sys, paceline; assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
