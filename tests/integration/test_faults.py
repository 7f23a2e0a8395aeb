"""Real processes that die, hang or err: the run goes on or ends by name, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import ServerLost, TrainError, WorkerLost
from paceline.watch.events import read
from tests.integration import trains


def pids(folder: Path) -> list[int]:
    return [e["pid"] for e in read(folder / "events" / "launcher.jsonl") if e["kind"] == "spawn"]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def used_positions(folder: Path) -> Counter[int]:
    """How often each position of the epoch's order is in an update."""
    updates = [e for e in read(folder / "events" / "server-0.jsonl") if e["kind"] == "update"]
    return Counter(i for e in updates for start, stop in e["ranges"] for i in range(start, stop))


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"workers": 3, "servers": 1, "runs": str(tmp_path), "name": "run", "lease_s": 4, "progress": False} | more


@pytest.mark.parametrize("when", ["bsp", "asp"])
def test_a_killed_worker_is_left_behind_and_every_example_is_used_once(tmp_path: Path, when: str) -> None:
    args = {"marker": str(tmp_path / "died")}
    run = paceline.launch(trains.die, **settings(tmp_path, when=when, on_loss="continue", args=args))
    assert (tmp_path / "died").exists()
    assert used_positions(run.folder) == Counter(range(96))
    epochs = [e for e in read(run.folder / "events" / "server-0.jsonl") if e["kind"] == "epoch"]
    assert [(e["used"], e["skipped"], e["examples"]) for e in epochs] == [(96, 0, 96)]
    assert not any(is_alive(pid) for pid in pids(run.folder))


def test_a_killed_worker_starts_again_and_joins(tmp_path: Path) -> None:
    args = {"marker": str(tmp_path / "died")}
    run = paceline.launch(trains.die, **settings(tmp_path, when="ssp:2", on_loss="restart", args=args))
    assert used_positions(run.folder) == Counter(range(96))
    joins = [
        (e["worker"], e["incarnation"]) for e in read(run.folder / "events" / "server-0.jsonl") if e["kind"] == "join"
    ]
    assert (1, 0) in joins
    assert [
        p
        for p in read(run.folder / "events" / "launcher.jsonl")
        if p.get("name") == "worker-1" and p["kind"] == "spawn"
    ][1:]


def test_a_killed_worker_stops_the_run_by_name(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with pytest.raises(WorkerLost, match=r"worker 1 .*SIGKILL"):
        paceline.launch(trains.die, **settings(tmp_path, args={"marker": str(tmp_path / "died")}))
    assert time.monotonic() - began_s < 30
    assert not any(is_alive(pid) for pid in pids(tmp_path / "run"))


def test_a_stopped_worker_is_lost_after_its_lease(tmp_path: Path) -> None:
    args = {"marker": str(tmp_path / "died"), "signal": "SIGSTOP"}
    with pytest.raises(WorkerLost, match=r"worker 1 .*silent for .*lease 2 s"):
        paceline.launch(trains.die, **settings(tmp_path, lease_s=2, args=args))
    assert not any(is_alive(pid) for pid in pids(tmp_path / "run"))


@pytest.mark.parametrize("server", [0, 1])
def test_a_killed_server_ends_the_run_by_name_within_the_lease(tmp_path: Path, server: int) -> None:
    with pytest.raises(ServerLost, match=rf"server {server} .*SIGKILL") as caught:
        paceline.launch(trains.kill_server, **settings(tmp_path, workers=2, servers=2, args={"server": server}))
    assert caught.value.exit_code == 4
    folder = tmp_path / "run"
    ends = [e["t"] for e in read(folder / "events" / "launcher.jsonl") if e["kind"] == "exit"]
    assert max(ends) - min(ends) < 4
    assert not any(is_alive(pid) for pid in pids(folder))


def test_a_long_evaluation_is_no_loss(tmp_path: Path) -> None:
    run = paceline.launch(trains.long_evaluation, **settings(tmp_path, workers=2, lease_s=1, args={"seconds": 2.5}))
    assert used_positions(run.folder) == Counter(range(96))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bug_in_the_script_ends_the_run_with_its_traceback(tmp_path: Path, when: str) -> None:
    with pytest.raises(TrainError, match=r"worker 1: ValueError: a bug") as caught:
        paceline.launch(trains.raises, **settings(tmp_path, workers=2, args={"when": when}))
    assert caught.value.exit_code == 1
    assert "ValueError: a bug" in (tmp_path / "run" / "log" / "worker-1.log").read_text()


LAUNCHER = """
import sys, paceline
from tests.integration import trains
if __name__ == "__main__":
    paceline.launch(trains.fit, workers=2, servers=1, runs=sys.argv[1], name="run", progress=False,
                    args={"sleep_s": 0.05, "epochs": 1000})
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_nothing_survives_the_launcher(tmp_path: Path, number: signal.Signals, code: int) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    env = os.environ | {"PYTHONPATH": os.getcwd()}
    cli = [sys.executable, "-m", "paceline", "train", "tests.integration.trains:fit", "--args.sleep_s", "0.05"]
    cli += ["--args.epochs", "1000", "--workers", "2", "--runs", str(tmp_path), "--name", "run"]
    command = [sys.executable, str(script), str(tmp_path)] if number == signal.SIGKILL else cli
    launcher = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "run"
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            path = folder / "events" / "worker-1.jsonl"
            if path.exists() and any(e["kind"] == "step" for e in read(path)):
                break
            time.sleep(0.1)
        children = pids(folder)
        assert len(children) == 3
        assert all(is_alive(pid) for pid in children)
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == code
        deadline_s = time.monotonic() + 5
        while any(is_alive(pid) for pid in children) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not any(is_alive(pid) for pid in children)
    finally:
        launcher.kill()
        launcher.wait()
    if number != signal.SIGKILL:
        last = json.loads((folder / "events" / "launcher.jsonl").read_text().splitlines()[-1])
        assert (last["kind"], last["status"]) == ("end", "interrupted")


def test_two_jobs_run_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "train", "tests.integration.trains:fit", "--workers", "2"]
    jobs = [
        subprocess.Popen([*command, "--runs", str(tmp_path)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for _ in "ab"
    ]
    assert [job.wait(timeout=90) for job in jobs] == [0, 0]
    assert len(list(tmp_path.glob("*/model.safetensors"))) == 2
