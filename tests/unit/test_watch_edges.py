"""What is told of an unusual run: torn files, killed processes, odd losses, narrow terminals."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.watch import plots, tables
from paceline.watch.compare import Comparison, Row, compare, read_aloud
from paceline.watch.curves import curve
from paceline.watch.events import EventLog, Tail, read
from paceline.watch.progress import Progress
from paceline.watch.summary import summarise
from tests.unit.test_watch import log, run, step


def printed(show: Any, width: int) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width))
    return out.getvalue()


def row(label: str, to_target_s: float | None, **more: Any) -> Row:
    fields: dict[str, Any] = {
        "folder": "",
        "status": "ok",
        "seconds": 123.4,
        "updates": 123456,
        "examples": 1e6,
        "examples_per_s": 12345.6,
        "loss": 0.1234,
        "metric": "accuracy",
        "metric_value": 0.9876,
        "mean_staleness": 0.0,
        "max_staleness": 0,
        "discarded": 0,
        "shares": {"computing": 0.9, "sending": 0.0, "waiting": 0.1, "no data": 0.0},
    }
    return Row(label=label, to_target_s=to_target_s, **fields | more)


def said(*rows: Row, target: float | None = 0.1) -> str:
    return read_aloud(Comparison(target, list(rows)))


# Events ---------------------------------------------------------------------------------------------------------------


def test_a_restarted_process_loses_only_the_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker-0.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"t": 1, "kind": "step"}\n{"t": 2, "ki')
    tail = Tail(tmp_path)
    assert [e["kind"] for _, e in tail.poll()] == ["step"]
    for incarnation in (1, 2):
        events = EventLog(path)
        events.write("start", incarnation=incarnation)
        events.close()
    assert [e.get("incarnation") for e in read(path)] == [None, 1, 2]
    assert [e["incarnation"] for _, e in tail.poll()] == [1, 2]
    assert path.read_bytes().count(b"\n\n") == 0


def test_any_text_and_any_number_can_be_written(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "x.jsonl", clock=lambda: 7.0)
    events.write("error", message="no such file: \udce9.txt", exit_code=3)
    events.write("log", values={"loss": float("nan"), "accuracy": float("inf")})
    events.close()
    first, second = read(tmp_path / "x.jsonl")
    assert first == {"t": 7.0, "kind": "error", "message": "no such file: \\udce9.txt", "exit_code": 3}
    assert second["values"] == {"loss": None, "accuracy": None}


# Summary --------------------------------------------------------------------------------------------------------------


def test_losses_that_are_not_finite_are_counted_and_shown(tmp_path: Path) -> None:
    run(tmp_path, losses=(1.0, 1.0))
    log(tmp_path, "worker-0", (120, "log", {"step": 4, "epoch": 0, "values": {"loss": None}}))
    summary = summarise(tmp_path)
    assert (summary.workers[0].loss, summary.workers[0].not_finite) == (None, 1)
    text = printed(lambda console: tables.show(summary, console), 100)
    assert "worker 0 logged a loss that was not finite once" in text
    found = curve(tmp_path)
    assert (found.loss, found.not_finite) == ([1.0, 1.0], 1)
    assert read_aloud(compare({"asp": tmp_path})).endswith("; asp logged a loss that was not finite once.")


def test_shares_are_of_each_workers_own_time(tmp_path: Path) -> None:
    run(tmp_path)
    finished, lost = summarise(tmp_path).workers
    assert finished.shares == pytest.approx({"computing": 0.6, "sending": 0.1, "waiting": 0.3, "no data": 0.0})
    assert sum(lost.shares.values()) == pytest.approx(1.0)


def test_a_killed_server_has_no_numbers_and_a_failed_one_its_message(tmp_path: Path) -> None:
    run(tmp_path)
    log(tmp_path, "server-1", (100, "start", {"index": 1, "pid": 1}))
    log(tmp_path, "server-2", (100, "error", {"type": "TrainError", "message": "out of [memory]", "fix": ""}))
    summary = summarise(tmp_path)
    assert [s.status for s in summary.servers] == ["finished", "did not finish", "failed: out of [memory]"]
    text = printed(lambda console: tables.show(summary, console), 100)
    assert "server 1 did not finish" in text
    assert "server 2 failed: out of [memory]" in text


def test_an_epoch_with_skipped_examples_was_not_used_whole(tmp_path: Path) -> None:
    run(tmp_path)
    log(tmp_path, "server-0", (108, "epoch", {"epoch": 1, "examples": 14, "used": 12, "skipped": 2}))
    text = printed(lambda console: tables.show(summarise(tmp_path), console), 140)
    assert "epochs used whole: 1 of 2, 2 examples skipped" in text


def test_no_steps_no_losses_no_launcher(tmp_path: Path) -> None:
    log(tmp_path, "worker-0", (1, "start", {"rank": 0}))
    summary = summarise(tmp_path)
    assert (summary.policy, summary.status, summary.workers[0].status) == (
        "unknown policy",
        "unknown",
        "did not finish",
    )
    assert sum(summary.workers[0].shares.values()) == 0
    printed(lambda console: tables.show(summary, console), 80)
    plots.draw_run(tmp_path, tmp_path / "run.png")
    result = compare({"bsp": tmp_path})
    plots.draw(result, tmp_path / "compare.png")
    assert read_aloud(result) == "No run finished, so there is no time to compare; bsp failed."


# Tables ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_number_is_cut_on_a_narrow_screen(tmp_path: Path, width: int) -> None:
    run(tmp_path, losses=(0.000123456,))
    for name in ("worker-0", "server-0"):
        log(tmp_path, name, (113, "end", {"steps": 1, "updates": 1, "apply_s": 12.3, "idle_s": 123.4} | TRAFFIC))
    text = printed(lambda console: tables.show(summarise(tmp_path), console), width)
    assert "…" not in text
    assert "254 MB" in text
    assert max(map(len, text.splitlines())) <= width
    result = Comparison(0.0123, [row("asp:compensate", 12.3, discarded=1234, max_staleness=20), row("bsp", None)])
    text = printed(result.show, width)
    assert "…" not in text
    for cell in ("asp:compensate", "123 s", "12.3 s", "0.1234", "0.9876", "123456", "12346", "0.0, 20", "1234"):
        assert cell in text
    assert max(map(len, text.splitlines())) <= width


TRAFFIC = {"bytes_in": 123_400_000, "bytes_out": 254_000_000}


def test_the_table_shows_one_metric_for_all_runs(tmp_path: Path) -> None:
    short, whole = run(tmp_path / "a"), run(tmp_path / "b")
    path = short / "events" / "worker-0.jsonl"
    path.write_text(path.read_text().replace("accuracy", "lr"))
    result = compare({"a": short, "b": whole})
    assert [(r.metric, r.metric_value) for r in result.rows] == [("accuracy", None), ("accuracy", 0.9)]


# The sentence ---------------------------------------------------------------------------------------------------------


def test_the_sentence_names_runs_that_did_not_reach_the_target() -> None:
    text = said(row("bsp", None), row("asp", 3.0), row("ssp:3", 3.1))
    assert text == "asp and ssp:3 reached a loss of 0.1 in about the same time, 3.00 s; bsp did not reach it."
    text = said(row("bsp", None), row("ssp:3", None), row("asp", 3.0, mean_staleness=2.0, max_staleness=4))
    assert text.startswith("asp alone reached a loss of 0.1 in 3.00 s, at the price of gradients that were 2.0 updates")
    assert text.endswith("; bsp and ssp:3 did not reach it.")
    text = said(row("bsp", None, loss=0.5), row("asp", None, loss=0.2))
    assert text == "No run reached a loss of 0.1: asp came nearest, ending at 0.2."


def test_each_of_two_winners_has_its_own_price() -> None:
    text = said(row("bsp", 9.0), row("asp", 3.0, mean_staleness=4.0, max_staleness=9), row("quorum:3", 3.1))
    assert text.startswith("asp and quorum:3 reached a loss of 0.1 first, in about 3.00 s: 3.0 times as fast as bsp;")
    assert "asp at the price of gradients that were 4.0 updates old on average" in text
    assert text.endswith("; quorum:3 at no price in staleness or discarded work.")


def test_the_sentence_is_one_sentence() -> None:
    text = said(row("bsp", 9.0), row("asp", 3.0), row("ssp:3", None, status="killed"), row("quorum:3", None))
    assert text.endswith("; quorum:3 did not reach it; ssp:3 failed.")
    assert ". " not in text


# Progress -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;a title\x07hi", "hi"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("a\u202eb\u2028c\x85d", "abcd"),
        ("\x1b[2J\x1b[38;5;1mx\x1b[0m", "x"),
        ("[bold]:smile:[/bold] é 日本", "[bold]:smile:[/bold] é 日本"),
    ],
)
def test_output_cannot_move_the_cursor(tmp_path: Path, text: str, shown: str) -> None:
    out = io.StringIO()
    Progress(tmp_path, Console(file=out, width=100)).print_line("worker-0", text)
    assert out.getvalue() == f"worker-0 {shown}\n"


@pytest.mark.parametrize("step_s", [0.1, 8.0])
def test_the_rate_is_right_for_fast_and_for_slow_steps(tmp_path: Path, step_s: float) -> None:
    now_s = time.time()
    for n in range(20):
        log(tmp_path, "worker-0", step(now_s - step_s * (19 - n) - 0.01, n, step_s * 0.6, step_s * 0.4 - 0.1))
    out = io.StringIO()
    with Progress(tmp_path, Console(file=out, force_terminal=True, width=100)) as progress:
        progress.update()
        assert progress._rate(0) == pytest.approx(4.0 / step_s, rel=0.02)


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    clock = [1000.0]
    monkeypatch.setattr("paceline.watch.progress.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    with Progress(tmp_path, Console(file=out, width=100)) as progress:
        for _ in range(120):
            clock[0] += 0.1
            progress.update()
    lines = [line for line in out.getvalue().splitlines() if "updates," in line]
    assert [line.split(":")[0] for line in lines] == ["5 s", "10 s"]
    assert "3 updates" in lines[0]
    assert "0 finished" in lines[0]
    assert "1 lost" in lines[0]
