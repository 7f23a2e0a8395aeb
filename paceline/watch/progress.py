"""Live progress: what each worker does now, above it the processes' output."""

from __future__ import annotations

import re
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.watch.events import Event, Tail
from paceline.watch.summary import KINDS
from paceline.watch.tables import table

STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
CONTROL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours and cursor moves
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links and other strings
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # other controls, also of direction
)
RATE_WINDOW_S = 5.0
"""The rate shown is that of the last seconds, or of the last step where that took longer."""
PLAIN_PERIOD_S = 5.0


class Progress:
    """A context manager; its owner calls `update()` now and then. On a console that is no terminal it prints a line
    every five seconds instead of a live table."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._console = console
        self._tail = Tail(folder)
        self._workers: dict[int, dict[str, Any]] = {}
        self._recent: dict[int, deque[tuple[float, float, float]]] = {}
        self._updates = 0
        self._began_s = time.monotonic()
        self._printed_s = self._began_s
        self._polled_s = 0.0
        live = console.is_terminal and not console.quiet
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, name: str, text: str) -> None:
        """Show a line of a process's output, with the process's name."""
        style = STYLES[sum(name.encode()) % len(STYLES)]
        self._console.print(Text.assemble((f"{name} ", style), CONTROL.sub("", text)), soft_wrap=True)

    def _say(self, text: str, style: str) -> None:
        self._console.print(Text(CONTROL.sub("", text), style), soft_wrap=True)

    def update(self) -> None:
        """Take in new events and, at most four times a second, show them."""
        now_s = time.monotonic()
        if self._console.quiet or now_s - self._polled_s < 0.25:
            return
        self._polled_s = now_s
        for name, event in self._tail.poll():
            self._take(name, event)
        if self._live is not None:
            self._live.update(Group(self._table()), refresh=True)
        elif now_s - self._printed_s > PLAIN_PERIOD_S:
            self._printed_s = now_s
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _take(self, name: str, event: Event) -> None:
        kind = event["kind"]
        if name.startswith("worker-"):
            rank = int(name[7:])
            row = self._workers.setdefault(
                rank, {"step": 0, "epoch": 0, "loss": None, "doing": "starting", "since": event["t"]}
            )
            if kind == "now":
                if row["doing"] != event["doing"]:
                    row.update(doing=event["doing"], since=event["t"])
            elif kind == "step":
                row.update(step=event["step"] + 1, epoch=event["epoch"], since=event["t"])
                began_s = event["t"] - sum(event[key] for key in KINDS.values())
                used = 0.0 if event["discarded"] else event["weight"]
                self._recent.setdefault(rank, deque(maxlen=10_000)).append((began_s, event["t"], used))
            elif kind == "log" and "loss" in event["values"]:
                row["loss"] = event["values"]["loss"]
            elif kind in ("end", "error"):
                row.update(doing="finished" if kind == "end" else "failed", since=event["t"])
        elif kind == "update":
            self._updates = event["version"]
        elif kind == "leave" and event["reason"] != "finished":
            self._workers.setdefault(event["worker"], {"step": 0, "epoch": 0, "loss": None})
            self._workers[event["worker"]].update(doing="lost", since=event["t"])
            self._say(f"worker {event['worker']} has left: {event['reason']}", "yellow")
        elif kind == "join" and event["incarnation"]:
            self._say(f"worker {event['worker']} has joined again", "green")

    def _rate(self, rank: int) -> float:
        """Examples a second over the window; the time since the last step counts once it is longer than usual."""
        recent = self._recent.get(rank)
        if not recent or self._workers[rank]["doing"] in ("finished", "failed", "lost"):
            return 0.0
        now_s = time.time()
        while len(recent) > 1 and now_s - recent[0][1] > RATE_WINDOW_S:
            recent.popleft()
        last_s = recent[-1][1] - recent[-1][0]
        until_s = now_s if now_s - recent[-1][1] > max(RATE_WINDOW_S, 2 * last_s) else recent[-1][1]
        return sum(weight for *_, weight in recent) / max(until_s - recent[0][0], 1e-3)

    def _table(self) -> Table:
        elapsed_s = time.monotonic() - self._began_s
        shown = table(
            f"{elapsed_s:.0f} s, {self._updates} updates", "worker", "epoch", "step", "loss", "examples/s", "now"
        )
        shown.columns[5].justify = "left"
        for rank, row in sorted(self._workers.items()):
            loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
            since_s = max(0.0, time.time() - row["since"])
            doing = f"{row['doing']} {since_s:.0f} s" if since_s >= 2 else row["doing"]
            shown.add_row(str(rank), str(row["epoch"]), str(row["step"]), loss, f"{self._rate(rank):.0f}", doing)
        return shown

    def _line(self) -> str:
        losses = [row["loss"] for row in self._workers.values() if row["loss"] is not None]
        loss = f", loss {sum(losses) / len(losses):.4f}" if losses else ""
        rate = sum(self._rate(rank) for rank in self._workers)
        doing = ", ".join(f"{rank} {row['doing']}" for rank, row in sorted(self._workers.items()))
        elapsed_s = time.monotonic() - self._began_s
        return (
            f"{elapsed_s:.0f} s: {self._updates} updates, {rate:.0f} examples/s{loss}; workers: {doing or 'starting'}"
        )
