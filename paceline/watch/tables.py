"""A summary as tables for people, or as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.watch.summary import Summary

UNITS = ("B", "kB", "MB", "GB", "TB")


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(4_200_000), in_bytes(12)
    ('4.2 MB', '12 B')
    """
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {UNITS[-1]}"


def table(title: str, *columns: str) -> Table:
    """An empty table whose columns but the first are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    return made


def to_json(summary: Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()


def show(summary: Summary, console: Console) -> None:
    """Print workers, servers, staleness, epochs and what was discarded."""
    head = (
        "worker",
        "steps",
        "examples",
        "ex/s",
        "computing",
        "sending",
        "waiting",
        "no data",
        "lost",
        "loss",
        "in",
        "out",
    )
    workers = table("Where the workers' time went", *head)
    for row in summary.workers:
        spent_s = row.compute_s + row.send_s + row.wait_s + row.idle_s
        shares = [
            f"{100 * t / spent_s:.0f}%" if spent_s else "-" for t in (row.compute_s, row.send_s, row.wait_s, row.idle_s)
        ]
        loss = "-" if row.loss is None else f"{row.loss:.4g}"
        cells = [str(row.worker), str(row.steps), f"{row.examples:g}", f"{row.examples_per_s:g}", *shares]
        workers.add_row(*cells, str(row.discarded), loss, in_bytes(row.bytes_in), in_bytes(row.bytes_out))
    console.print(workers)
    for row in summary.workers:
        if row.status != "finished":
            console.print(f"worker {row.worker} {escape(row.status)}", style="yellow", soft_wrap=True)
    servers = table("Servers", "server", "updates", "applying", "idle", "in", "out")
    for server in summary.servers:
        cells = [str(server.server), str(server.updates), f"{server.apply_s:.2f} s", f"{server.idle_s:.2f} s"]
        servers.add_row(*cells, in_bytes(server.bytes_in), in_bytes(server.bytes_out))
    console.print(servers)
    if len(summary.staleness) > 1 or summary.max_staleness:
        staleness = table("Staleness (updates between read and use)", "updates", "contributions", "")
        most = max(summary.staleness.values())
        for tau, count in summary.staleness.items():
            staleness.add_row(str(tau), str(count), "█" * max(1, round(30 * count / most)))
        staleness.columns[2].justify = "left"
        console.print(staleness)
    discarded = ", ".join(f"{count} {reason}" for reason, count in summary.discarded.items()) or "none"
    skipped = sum(epoch.skipped for epoch in summary.epochs)
    whole = sum(epoch.used + epoch.skipped == epoch.examples for epoch in summary.epochs if epoch.examples)
    console.print(
        f"{summary.policy}: {summary.updates} updates, {summary.examples:g} examples in {summary.seconds:.1f} s "
        f"({summary.examples_per_s:g}/s); discarded contributions: {discarded}; "
        f"epochs used whole: {whole} of {len(summary.epochs)}" + (f", {skipped} examples skipped" if skipped else ""),
        highlight=False,
    )
