"""A run: its folder on disk and what is in it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import JobError
from paceline.job import Job, label, load, to_toml

if TYPE_CHECKING:
    import torch


class Run:
    """A finished run, as `launch` returns it, or any run folder: `Run("runs/NAME")`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @cached_property
    def job(self) -> Job:
        """The job as it ran."""
        return load(self.folder / "job.toml")

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The summary: workers, servers, staleness, discarded contributions, totals (see `metrics.json`)."""
        return json.loads((self.folder / "metrics.json").read_text())

    def weights(self) -> dict[str, torch.Tensor]:
        """The final values of the model, by name."""
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")


def make_folder(job: Job) -> Path:
    """Make the run's folder: `runs/NAME`, or one named by the time and the policy. Raises JobError when it exists, or
    cannot be made."""
    base = Path(job.runs)
    try:
        base.mkdir(parents=True, exist_ok=True)
        if job.name:
            folder = base / job.name
            folder.mkdir()
        else:
            folder = _fresh(base, job)
    except FileExistsError as error:
        what = f"the run folder {error.filename!r} exists"
        raise JobError(what, "give another name, or remove it; a run never writes over another") from None
    except OSError as error:
        raise JobError(f"cannot make the run folder: {error}", "set `runs` to a folder you may write to") from None
    (folder / "events").mkdir()
    (folder / "log").mkdir()
    (folder / "job.toml").write_text(to_toml(job))
    (folder / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
    return folder


def _fresh(base: Path, job: Job) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    kind = label(job.when).replace(":", "-").replace(",", "-")
    for n in range(1000):
        folder = base / (f"{stamp}-{kind}" + (f"-{n + 1}" if n else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(None, None, str(base / stamp))


def environment() -> dict[str, Any]:
    """What a run depends on and the job does not say: versions, host, cores, the command."""
    from importlib.metadata import version

    import paceline

    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "cwd": os.getcwd(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(),
    }
