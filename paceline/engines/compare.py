"""The same job under several policies, one run after the other, and what each did to time and to loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline import job as jobs
from paceline.engines.local import launch
from paceline.engines.run import make_folder
from paceline.errors import JobError, PacelineError
from paceline.job import Job
from paceline.policies import Policy
from paceline.watch import plots
from paceline.watch.compare import Comparison, read_aloud
from paceline.watch.compare import compare as compare_folders


class Compared:
    """What a comparison found. `exit_code` is that of the first run that failed, or 0."""

    def __init__(self, comparison: Comparison, folder: Path, picture: Path, exit_code: int) -> None:
        self.comparison = comparison
        self.folder = folder
        self.picture = picture
        self.exit_code = exit_code

    def to_json(self) -> str:
        return self.comparison.to_json()

    def show(self, console: Console) -> None:
        """The table, the picture's path, and one sentence that reads the result."""
        self.comparison.show(console)
        console.print(f"picture: {self.picture}", highlight=False, soft_wrap=True)
        console.print(read_aloud(self.comparison), highlight=False)


def compare_policies(
    job: Job, policies: Sequence[Policy], target: float | None = None, progress: bool = True
) -> Compared:
    """Run `job` under each policy; the runs' folders lie in one folder, with `compare.json` and `compare.png` beside
    them. A run that fails is a row that says so. Raises JobError, ScriptError or AddressError before any run."""
    labels = [jobs.label(policy) for policy in policies]
    if len(set(labels)) < len(labels):
        raise JobError(f"compare got a policy twice: {', '.join(labels)}", "give each policy once")
    console = Console(stderr=True, quiet=not progress)
    outer = make_folder(dataclasses.replace(job, name=job.name or f"compare-{_stamp()}"))
    for part in ("events", "log"):
        (outer / part).rmdir()
    folders: dict[str, Path] = {}
    exit_code = 0
    for policy in policies:
        label = jobs.label(policy)
        name = label.replace(":", "-").replace(",", "-")
        console.rule(f"{label}: {job.workers} workers, {job.servers} servers{_slow(job)}", align="left")
        folders[label] = outer / name
        try:
            launch(dataclasses.replace(job, when=policy, name=name, runs=str(outer)), progress=progress)
        except PacelineError as error:
            if not folders[label].exists():
                raise
            console.print(f"{label} failed: {error}", style="red", markup=False, soft_wrap=True)
            exit_code = exit_code or error.exit_code
    comparison = compare_folders(folders, target)
    (outer / "compare.json").write_text(comparison.to_json())
    picture = outer / "compare.png"
    plots.draw(comparison, picture)
    return Compared(comparison, outer, picture, exit_code)


def _slow(job: Job) -> str:
    slowed = [f"worker {rank} made {factor:g} times slower" for rank, factor in sorted(job.slow.items())]
    return ", " + ", ".join(slowed) if slowed else ""


def _stamp() -> str:
    import datetime

    return datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
