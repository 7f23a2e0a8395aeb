"""The command line: train, compare, show, policies, simulate.

Every setting of a job is a flag of its name, as in `--workers 4`, `--when ssp:3` or `--when.slack 3`, which is short
for `--set workers=4` and so on. Exit codes are those of `paceline.errors`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.markup import escape

from paceline import job as jobs
from paceline.errors import JobError, PacelineError
from paceline.job import Job

app = App(
    name="paceline", help="Plain PyTorch training on machines that do not keep pace.", version_flags=["--version"]
)

OWN_FLAGS = {
    "train": ["--set", "--json", "--help", "-h"],
    "compare": ["--set", "--json", "--when", "--target", "--help", "-h"],
}

Sets = Annotated[list[str] | None, Parameter(name="--set", negative=(), help="A setting, as path=value; repeatable.")]
Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON instead of tables.")]


@app.command
def train(target: str, /, *, set_: Sets = None, json_: Json = False) -> int:
    """Train once: TARGET is a job file (JOB.toml) or a train function (script.py:function)."""
    from paceline.engines.local import launch
    from paceline.watch import tables
    from paceline.watch.summary import summarise

    run = launch(_job(target, set_), progress=True)
    summary = summarise(run.folder)
    if json_:
        print(tables.to_json(summary))
    else:
        console = _console()
        tables.show(summary, console)
        console.print(f"run folder: {run.folder}", highlight=False, soft_wrap=True)
    return 0


@app.command
def compare(
    target: str,
    /,
    *,
    when: Annotated[list[str] | None, Parameter(negative=(), help="A policy, as ssp:3; one for each run.")] = None,
    goal: Annotated[float | None, Parameter(name="--target", help="The loss to time; default: one all reach.")] = None,
    set_: Sets = None,
    json_: Json = False,
) -> int:
    """Run the same job under each policy given, and show what each did to time and to loss."""
    from paceline.engines.compare import compare_policies

    policies = [jobs.policy(text) for text in when or []]
    if len(policies) < 2:
        raise JobError(f"compare got {len(policies)} policies", "give two or more, as in --when bsp --when ssp:3")
    result = compare_policies(_job(target, set_), policies, goal)
    if json_:
        print(result.to_json())
    else:
        result.show(_console())
    return result.exit_code


@app.command
def show(folder: str, /, *, json_: Json = False) -> int:
    """Show where the time of a run went: FOLDER is runs/NAME."""
    from pathlib import Path

    from paceline.watch import plots, tables
    from paceline.watch.summary import summarise

    if not (Path(folder) / "events").is_dir():
        raise JobError(f"{folder!r} is no run folder", "give runs/NAME, a folder with events in it")
    summary = summarise(Path(folder))
    if json_:
        print(tables.to_json(summary))
        return 0
    console = _console()
    tables.show(summary, console)
    picture = Path(folder) / "run.png"
    plots.draw_run(Path(folder), picture)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return 0


@app.command
def policies(*, json_: Json = False, markdown: Annotated[bool, Parameter(negative=())] = False) -> int:
    """List the policies with their settings."""
    rows = [_policy_row(cls) for cls in jobs.REGISTRY.values()]
    if json_:
        print(json.dumps(rows, indent=2))
    elif markdown:
        print(policies_markdown(), end="")
    else:
        from rich.table import Table

        table = Table("policy", "settings", "what it does", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row["kind"], escape(row["settings"]), escape(row["summary"]))
        _console().print(table)
    return 0


def policies_markdown() -> str:
    """The table of policies, from their declarations."""
    rows = [_policy_row(cls) for cls in jobs.REGISTRY.values()]
    lines = [f"| `{row['kind']}` | {row['settings']} | {row['summary']} |\n" for row in rows]
    return "| policy | settings | what it does |\n|---|---|---|\n" + "".join(lines)


def _policy_row(cls: type[jobs.Policy]) -> dict[str, str]:
    settings = [
        f"{key}" if default is dataclasses.MISSING else f"{key} = {json.dumps(default)}"
        for key, default in jobs.settings(cls).items()
    ]
    summary = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return {"kind": cls.kind, "settings": ", ".join(settings) or "-", "summary": summary}


@app.command
def simulate(
    *,
    workers: int = 4,
    servers: int = 1,
    when: Annotated[list[str] | None, Parameter(negative=(), help="A policy, as ssp:3; repeatable.")] = None,
    examples: Annotated[int, Parameter(help="Examples in an epoch.")] = 10_000,
    batch: Annotated[int, Parameter(help="Examples in a worker's batch.")] = 32,
    epochs: int = 1,
    compute_s: Annotated[float, Parameter(help="Seconds that a batch takes.")] = 0.1,
    slow: Annotated[dict[str, float] | None, Parameter(help="Slower workers, as --slow.3 5.0.")] = None,
    parameters_bytes: int = 4_000_000,
    bandwidth_bits_per_s: float = 1e9,
    latency_s: float = 0.0005,
    json_: Json = False,
) -> int:
    """Predict, on virtual time and by the same protocol code, what each policy does to the pace."""
    from rich.table import Table

    from paceline.simulate import simulate as run

    rows = []
    for text in when or ["bsp", f"quorum:{max(1, workers - 1)}", "ssp:3", "asp"]:
        job = jobs.job(when=text, workers=workers, servers=servers, slow=slow or {})
        result = run(
            job,
            examples=examples,
            batch=batch,
            epochs=epochs,
            compute_s=compute_s,
            parameters_bytes=parameters_bytes,
            bandwidth_bits_per_s=bandwidth_bits_per_s,
            latency_s=latency_s,
        )
        count = sum(result.staleness.values())
        mean = sum(tau * n for tau, n in result.staleness.items()) / count if count else 0.0
        rows.append(
            {
                "policy": jobs.label(job.when),
                "seconds": round(result.seconds, 3),
                "updates": result.updates,
                "examples_per_s": round(result.examples / result.seconds, 1) if result.seconds else 0.0,
                "mean_staleness": round(mean, 2),
                "max_staleness": max(result.staleness, default=0),
            }
        )
    if json_:
        print(json.dumps(rows, indent=2))
    else:
        table = Table(*rows[0], box=None, pad_edge=False)
        for row in rows:
            table.add_row(*[str(value) for value in row.values()])
        _console().print(table)
    return 0


def _console() -> Console:
    """Standard output; where that is no terminal, wide enough for every table."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _job(target: str, sets: list[str] | None) -> Job:
    """The job that TARGET and the settings describe. Raises JobError."""
    if target.endswith(".toml"):
        return jobs.load(target, tuple(sets or ()))
    return jobs.job(**jobs.with_sets({"script": target}, tuple(sets or ())))


def settings_as_sets(argv: Sequence[str]) -> list[str]:
    """Write a job's settings among the flags of `train` and `compare` as `--set path=value`.

    >>> settings_as_sets(["train", "a.py:fit", "--workers", "4", "--when.slack=2", "--json"])
    ['train', 'a.py:fit', '--set', 'workers=4', '--set', 'when.slack=2', '--json']
    """
    own = OWN_FLAGS.get(argv[0] if argv else "")
    if own is None:
        return list(argv)
    out: list[str] = []
    rest = iter(argv)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in own:
            out.append(word)
            if flag in own and flag not in ("--json", "--help") and not equals:
                out.extend([value] if (value := next(rest, "")) else [])
            continue
        path = flag[2:].replace("-", "_")
        if not equals:
            value = next(rest, "")
            if not value or value.startswith("--"):
                raise JobError(f"{flag} has no value", f"write it as {flag} VALUE")
        out += ["--set", f"{path}={value}"]
    return out


def settings_help() -> str:
    """The settings of a job, a line each, from its own declaration."""
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(Job))).body[0]
    assert isinstance(body, ast.ClassDef)
    lines = []
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            name = ast.unparse(field.target)
            lines.append(f"  --{name.replace('_', '-')}: {' '.join(str(doc.value.value).split())}")
    return "Settings of a job, as flags or in TOML:\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command; its exit code."""
    errors = Console(stderr=True)
    try:
        words = settings_as_sets(argv)
        result: Any = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        if words[:1] in (["train"], ["compare"]) and {"--help", "-h"} & set(words):
            Console().print(settings_help(), highlight=False, markup=False)
        return result if isinstance(result, int) else 0
    except PacelineError as error:
        errors.print(f"[bold red]error:[/] {escape(error.what)}", highlight=False, soft_wrap=True)
        if error.fix:
            errors.print(f"  [bold]fix:[/] {escape(error.fix)}", highlight=False, soft_wrap=True)
        return error.exit_code
    except CycloptsError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        errors.print("  [bold]fix:[/] paceline --help lists the commands", highlight=False)
        return 2
    except KeyboardInterrupt:
        errors.print("interrupted: all processes have ended")
        return 130


if __name__ == "__main__":
    main()
