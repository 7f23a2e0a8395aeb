"""A summary as tables for people, or as JSON."""

from __future__ import annotations

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.watch.summary import KINDS, Summary

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


def in_seconds(time_s: float) -> str:
    """
    >>> in_seconds(0.0123), in_seconds(5.678), in_seconds(18.06), in_seconds(4321.4)
    ('0.012 s', '5.68 s', '18.1 s', '4321 s')
    """
    return f"{time_s:.{3 if time_s < 1 else 2 if time_s < 10 else 1 if time_s < 100 else 0}f} s"


def number(count: float) -> str:
    """
    >>> number(14370.0), number(1234567.8), number(7.25)
    ('14370', '1234568', '7.25')
    """
    return f"{count:.0f}" if count >= 100 or count == round(count) else f"{count:.3g}"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def table(title: str, *columns: str) -> Table:
    """An empty table whose columns but the first are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left")
    return made


def show_table(shown: Table, console: Console) -> None:
    """Print a table. Where it is too wide, columns stand closer and their heads are folded, but cells stay whole."""
    cells = [max((cell_len(str(cell)) for cell in column.cells), default=0) for column in shown.columns]
    widths = [max(width, cell_len(str(column.header))) for width, column in zip(cells, shown.columns, strict=True)]
    gaps = len(widths) - 1
    gap = 2 if sum(widths) + 2 * gaps <= console.width else 1
    while sum(widths) + gap * gaps > console.width:
        slack, widest = max((width - cell, i) for i, (width, cell) in enumerate(zip(widths, cells, strict=True)))
        if not slack:
            break
        widths[widest] -= 1
    for width, column in zip(widths, shown.columns, strict=True):
        column.width, column.overflow = max(width, 1), "fold"
    shown.padding = (0, gap, 0, 0)
    console.print(shown)


def to_json(summary: Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()


def show(summary: Summary, console: Console) -> None:
    """Print workers, servers, staleness, epochs and what was discarded."""
    workers = table(
        "Where the workers' time went",
        *("worker", "steps", "examples", "ex/s", *KINDS, "discarded", "loss", "in", "out"),
    )
    for row in summary.workers:
        cells = [str(row.worker), str(row.steps), number(row.examples), number(row.examples_per_s)]
        cells += [f"{100 * share:.0f}%" if row.steps else "-" for share in row.shares.values()]
        cells += [str(row.discarded), _loss(row.loss, row.not_finite)]
        workers.add_row(*cells, *_traffic(row.bytes_in, row.bytes_out, row.status))
    show_table(workers, console)
    servers = table("Servers", "server", "updates", "applying", "idle", "in", "out")
    for server in summary.servers:
        cells = [str(server.updates), in_seconds(server.apply_s), in_seconds(server.idle_s)]
        cells += _traffic(server.bytes_in, server.bytes_out, server.status)
        servers.add_row(str(server.server), *(cells if server.status != "did not finish" else ["-"] * len(cells)))
    show_table(servers, console)
    for name, status in [
        *((f"worker {row.worker}", row.status) for row in summary.workers),
        *((f"server {server.server}", server.status) for server in summary.servers),
    ]:
        if status != "finished":
            console.print(f"{name} {escape(status)}", style="yellow", highlight=False, soft_wrap=True)
    for row in summary.workers:
        if row.not_finite:
            text = f"worker {row.worker} logged a loss that was not finite {times(row.not_finite)}"
            console.print(text, style="yellow", highlight=False, soft_wrap=True)
    if len(summary.staleness) > 1 or summary.max_staleness:
        staleness = table("Staleness (updates between read and use)", "updates", "contributions", "")
        most = max(summary.staleness.values())
        for tau, count in summary.staleness.items():
            staleness.add_row(str(tau), str(count), "█" * max(1, round(30 * count / most)))
        staleness.columns[2].justify = "left"
        show_table(staleness, console)
    discarded = ", ".join(f"{count} {reason}" for reason, count in summary.discarded.items()) or "none"
    skipped = sum(epoch.skipped for epoch in summary.epochs)
    epochs = [epoch for epoch in summary.epochs if epoch.examples]
    whole = sum(epoch.used == epoch.examples for epoch in epochs)
    used = f"; epochs used whole: {whole} of {len(epochs)}" if epochs else ""
    console.print(
        f"{escape(summary.policy)}: {summary.updates} updates, {number(summary.examples)} examples in "
        f"{in_seconds(summary.seconds)} ({number(summary.examples_per_s)}/s); discarded contributions: {discarded}"
        f"{used}" + (f", {skipped} examples skipped" if skipped else ""),
        highlight=False,
    )


def _loss(loss: float | None, not_finite: int) -> str:
    return f"{loss:.3g}" if loss is not None else "not finite" if not_finite else "-"


def _traffic(bytes_in: int, bytes_out: int, status: str) -> tuple[str, str]:
    """Both counts, or dashes: a process that was killed could not say them."""
    if not bytes_in + bytes_out and status != "finished":
        return "-", "-"
    return in_bytes(bytes_in), in_bytes(bytes_out)
