"""Events, summaries, curves, comparisons: numbers from run folders made by hand."""

from __future__ import annotations

import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.watch import plots, tables
from paceline.watch.compare import Comparison, compare, read_aloud
from paceline.watch.curves import curve, time_to
from paceline.watch.events import EventLog, Tail, read
from paceline.watch.progress import Progress
from paceline.watch.summary import summarise, write_metrics


def log(folder: Path, name: str, *events: tuple[float, str, dict[str, Any]]) -> None:
    path = folder / "events" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for t, kind, fields in events:
            file.write(json.dumps({"t": t, "kind": kind, **fields}) + "\n")


def step(
    t: float, n: int, compute_s: float = 0.6, wait_s: float = 0.3, **more: Any
) -> tuple[float, str, dict[str, Any]]:
    times = {"compute_s": compute_s, "send_s": 0.1, "wait_s": wait_s, "idle_s": 0.0}
    return (
        t,
        "step",
        {"step": n, "epoch": 0, "weight": 4.0, "version": n, "staleness": 0, "discarded": False} | times | more,
    )


def run(
    folder: Path, pace_s: float = 1.0, losses: tuple[float, ...] = (1.0, 0.5, 0.25), status: str = "ok", stale: int = 0
) -> Path:
    """One worker that finishes, one that is lost after a step; an update every `pace_s` seconds."""
    log(
        folder,
        "launcher",
        (0, "job", {"when": {"kind": "ssp", "slack": 3}}),
        (99, "end", {"status": status, "error": None}),
    )
    for n, loss in enumerate(losses):
        t = 100 + pace_s * (n + 1)
        parts = [[0, n, 4.0, stale]] + ([[1, 0, 2.0, stale]] if n == 0 else [])
        log(folder, "server-0", (t, "update", {"version": n + 1, "parts": parts, "lr_scale": 1.0, "ranges": []}))
        log(
            folder,
            "worker-0",
            step(t, n, pace_s * 0.6, pace_s * 0.3 + (pace_s - 1) * 0.1),
            (t + 1e-3, "log", {"step": n, "epoch": 0, "values": {"loss": loss}}),
        )
    log(folder, "worker-1", step(101, 0))
    log(folder, "worker-0", (110, "log", {"step": 3, "epoch": 0, "values": {"accuracy": 0.9}}))
    log(folder, "worker-0", (111, "end", {"steps": 3, "bytes_in": 10, "bytes_out": 20}))
    log(
        folder,
        "server-0",
        (105, "discard", {"worker": 1, "step": 1, "weight": 2.0, "reason": "late"}),
        (106, "leave", {"worker": 1, "incarnation": 0, "reason": "its link closed"}),
        (107, "epoch", {"epoch": 0, "examples": 14, "used": 14, "skipped": 0}),
        (112, "end", {"updates": 3, "apply_s": 0.5, "idle_s": 9.0, "bytes_in": 5, "bytes_out": 6}),
    )
    return folder


def test_the_summary_adds_up(tmp_path: Path) -> None:
    summary = summarise(run(tmp_path))
    assert (summary.updates, summary.examples, summary.seconds) == (3, 14.0, 3.0)
    assert summary.examples_per_s == pytest.approx(14 / 3, abs=0.05)
    assert summary.staleness == {0: 4}
    assert summary.discarded == {"late": 1}
    finished, lost = summary.workers
    assert (finished.status, finished.steps, finished.examples, finished.loss) == ("finished", 3, 12.0, 0.25)
    assert finished.compute_s == pytest.approx(1.8)
    assert (lost.status, lost.discarded, lost.examples) == ("lost: its link closed", 1, 2.0)
    assert (summary.servers[0].apply_s, summary.servers[0].bytes_out) == (0.5, 6)
    write_metrics(tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["updates"] == 3
    console = Console(file=io.StringIO(), width=140)
    tables.show(summary, console)
    assert "worker 1 lost: its link closed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_empty_run_has_a_summary(tmp_path: Path) -> None:
    log(tmp_path, "launcher", (0, "job", {"when": {"kind": "bsp"}}))
    summary = summarise(tmp_path)
    assert (summary.updates, summary.seconds, summary.examples_per_s, summary.workers) == (0, 0.0, 0.0, [])
    tables.show(summary, Console(file=io.StringIO()))
    plots.draw_run(tmp_path, tmp_path / "run.png")


def test_torn_lines_are_passed_over_and_read_once_whole(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker-0.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"t": 1, "kind": "a"}\nnot json\n{"t": 2, "ki')
    assert [e["kind"] for e in read(path)] == ["a"]
    tail = Tail(tmp_path)
    assert [e["kind"] for _, e in tail.poll()] == ["a"]
    with path.open("ab") as file:
        file.write(b'nd": "b"}\n')
    assert tail.poll() == [("worker-0", {"t": 2, "kind": "b"})]
    assert tail.poll() == []


def test_events_from_many_threads_stay_whole(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "x.jsonl")
    threads = [
        threading.Thread(target=lambda: [events.write("e", text="x" * 500) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    events.write("after close")
    assert len(read(tmp_path / "x.jsonl")) == 800


def test_curves_are_smoothed_without_start_bias_and_skip_nan(tmp_path: Path) -> None:
    found = curve(run(tmp_path, losses=(2.0, math.nan, 2.0)))
    assert found.loss == pytest.approx([2.0, 2.0])
    assert found.examples == [6.0, 14.0]
    assert found.seconds == pytest.approx([1.001, 3.001])
    assert found.metrics == {"accuracy": [(10.0, 0.9)]}
    assert time_to(found, 1.0) is None


def compared(tmp_path: Path, **paces: float) -> Comparison:
    return compare({label: run(tmp_path / label, pace, stale=int(label == "asp")) for label, pace in paces.items()})


def test_a_comparison_times_the_loss_that_all_reach(tmp_path: Path) -> None:
    result = compared(tmp_path, bsp=4.0, asp=1.0)
    rows = {row.label: row for row in result.rows}
    assert result.target == pytest.approx(rows["bsp"].loss)
    assert rows["bsp"].to_target_s == pytest.approx(12.001)
    assert rows["asp"].to_target_s == pytest.approx(3.001)
    assert rows["asp"].metric_value == 0.9
    said = read_aloud(result)
    assert said.startswith("asp reached a loss of")
    assert "4.0 times as fast as bsp" in said
    assert "1.0 updates old" in said
    assert json.loads(result.to_json())["rows"][0]["label"] == "bsp"
    plots.draw(result, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_sentence_is_true_of_ties_single_runs_and_failures(tmp_path: Path) -> None:
    assert "about the same time" in read_aloud(compared(tmp_path / "a", bsp=1.0, asp=1.02))
    single = compare({"bsp": run(tmp_path / "b")}, target=0.9)
    assert read_aloud(single).startswith("bsp reached a loss of 0.9 in")
    failed = compare({"bsp": run(tmp_path / "c"), "asp": run(tmp_path / "d", status="failed")})
    assert read_aloud(failed).endswith("asp failed.")
    assert "No run reached" in read_aloud(compare({"bsp": run(tmp_path / "e", losses=())}))


def test_progress_shows_lines_without_control_characters(tmp_path: Path) -> None:
    run(tmp_path)
    for terminal in (True, False):
        out = io.StringIO()
        with Progress(tmp_path, Console(file=out, force_terminal=terminal, width=100)) as progress:
            progress.print_line("worker-0", "\x1b[31m[red]100%\x07\x1b[0m")
            progress.update()
        assert "[red]100%" in out.getvalue()
        assert "\x07" not in out.getvalue()
