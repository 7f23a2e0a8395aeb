"""The command line on real processes, and the examples against what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import cli, job
from paceline.policies import REGISTRY
from paceline.watch.events import read_all

ROOT = Path(__file__).parents[2]


def paceline_command(*argv: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def logged(folder: Path, name: str) -> list[float]:
    rows = [e for events in read_all(folder).values() for e in events if e["kind"] == "log"]
    return [e["values"][name] for e in sorted(rows, key=lambda e: e["t"]) if name in e["values"]]


@pytest.mark.timeout(400)
def test_the_demo_reaches_97_percent_under_every_policy(tmp_path: Path) -> None:
    """What `make demo` runs: four policies, four workers, two servers, one slow; a table, a picture, a sentence."""
    flags = [word for when in ("bsp", "quorum:3", "ssp:3", "asp") for word in ("--when", when)]
    done = paceline_command("compare", "examples/digits.toml", *flags, "--runs", str(tmp_path), timeout_s=390)
    assert done.returncode == 0, done.stderr
    (outer,) = tmp_path.iterdir()
    assert str(outer / "compare.png") in done.stdout
    assert (outer / "compare.png").stat().st_size > 20_000
    assert done.stdout.rstrip().endswith(".")
    rows: dict[str, dict[str, Any]] = {
        row["label"]: row for row in json.loads((outer / "compare.json").read_text())["rows"]
    }
    assert list(rows) == ["bsp", "quorum:3", "ssp:3", "asp"]
    for label, row in rows.items():
        assert row["status"] == "ok"
        assert row["metric_value"] >= 0.97, f"{label}: {row['metric_value']}"
        assert label in done.stdout
    assert rows["bsp"]["max_staleness"] == 0
    assert rows["asp"]["max_staleness"] > 0
    assert rows["quorum:3"]["discarded"] > 0
    assert rows["bsp"]["shares"]["waiting"] > rows["asp"]["shares"]["waiting"]


def test_the_language_model_learns(tmp_path: Path) -> None:
    sets = ["--args.megabytes", "0.15", "--accumulate", "2", "--runs", str(tmp_path), "--name", "lm"]
    done = paceline_command("train", "examples/bytes_lm.toml", *sets, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "ok"
    bits = logged(tmp_path / "lm", "bits_per_byte")
    assert bits[0] > 6
    assert bits[-1] < bits[0] - 2


def test_a_run_leaves_a_job_that_runs_again(tmp_path: Path) -> None:
    argv = [
        "tests.integration.trains:fit",
        "--when.kind",
        "ssp",
        "--when.slack",
        "2",
        "--workers",
        "1",
        "--link",
        "tcp",
    ]
    done = paceline_command("train", *argv, "--runs", str(tmp_path), "--name", "first", "--slow.0", "2")
    assert done.returncode == 0, done.stderr
    first = paceline.Run(tmp_path / "first")
    assert first.job.when == paceline.SSP(slack=2)
    assert first.job.slow == {0: 2.0}
    assert first.metrics["updates"] == 24
    for name in ("environment.json", "metrics.json", "model.safetensors", "log/worker-0.log", "events/server-0.jsonl"):
        assert (first.folder / name).exists()
    again = paceline_command(
        "train", str(tmp_path / "first" / "job.toml"), "--name", "second", "--set", "runs=" + str(tmp_path)
    )
    assert again.returncode == 0, again.stderr
    assert paceline_command("show", str(tmp_path / "second")).returncode == 0
    assert (tmp_path / "second" / "run.png").exists()


def test_a_run_that_fails_in_a_comparison_is_a_row(tmp_path: Path) -> None:
    argv = ["tests.integration.trains:raises_under_asp", "--workers", "1", "--runs", str(tmp_path)]
    done = paceline_command("compare", *argv, "--when", "asp", "--when", "bsp", "--json")
    assert done.returncode == 1
    rows = json.loads(done.stdout)["rows"]
    assert "a bug" in rows[0]["status"]
    assert rows[1]["status"] == "ok"


def test_the_readme_has_the_policies_as_they_declare_themselves() -> None:
    assert cli.policies_markdown() in (ROOT / "README.md").read_text()
    assert set(REGISTRY) == {"asp", "bsp", "quorum", "ssp"}


def test_help_lists_every_setting_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in job.Job.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown


def test_simulate_and_policies_print_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["simulate", "--workers", "8", "--slow.7", "5.0", "--examples", "20000", "--json"]) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["asp"]["examples_per_s"] > 3 * rows["bsp"]["examples_per_s"]
    assert cli.run(["policies", "--json"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} == set(REGISTRY)
    assert cli.run(["simulate", "--workers", "4"]) == 0
    assert "bsp" in capsys.readouterr().out
