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
from paceline.watch.tables import table

STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
RATE_WINDOW_S = 5.0
PLAIN_PERIOD_S = 5.0


class Progress:
    """A context manager; its owner calls `update()` now and then. On a console that is no terminal it prints a line
    every five seconds instead of a live table."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._console = console
        self._tail = Tail(folder)
        self._workers: dict[int, dict[str, Any]] = {}
        self._recent: dict[int, deque[tuple[float, float]]] = {}
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
                if not event["discarded"]:
                    self._recent.setdefault(rank, deque(maxlen=10_000)).append((event["t"], event["weight"]))
            elif kind == "log" and "loss" in event["values"]:
                row["loss"] = event["values"]["loss"]
            elif kind in ("end", "error"):
                row.update(doing="finished" if kind == "end" else "failed", since=event["t"])
        elif kind == "update":
            self._updates = event["version"]
        elif kind == "leave" and event["reason"] != "finished":
            self._workers.setdefault(event["worker"], {"step": 0, "epoch": 0, "loss": None})
            self._workers[event["worker"]].update(doing="lost", since=event["t"])
            self._console.print(f"worker {event['worker']} has left: {event['reason']}", style="yellow", markup=False)
        elif kind == "join" and event["incarnation"]:
            self._console.print(f"worker {event['worker']} has joined again", style="green", markup=False)

    def _rate(self, rank: int) -> float:
        recent = self._recent.get(rank, deque())
        now_s = time.time()
        while recent and now_s - recent[0][0] > RATE_WINDOW_S:
            recent.popleft()
        return sum(weight for _, weight in recent) / RATE_WINDOW_S

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
