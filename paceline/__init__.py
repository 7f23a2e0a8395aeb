"""Plain PyTorch training on machines that do not keep pace: how workers synchronise is a setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.engines.local import launch
    from paceline.engines.run import Run
    from paceline.errors import PacelineError
    from paceline.job import Job
    from paceline.policies import ASP, BSP, SSP, Quorum
    from paceline.train import batch
    from paceline.train.worker import Worker

_HOMES = {
    "launch": "paceline.engines.local",
    "Run": "paceline.engines.run",
    "PacelineError": "paceline.errors",
    "Job": "paceline.job",
    "ASP": "paceline.policies",
    "BSP": "paceline.policies",
    "SSP": "paceline.policies",
    "Quorum": "paceline.policies",
    "batch": "paceline.train",
    "Worker": "paceline.train.worker",
}

__all__ = ["ASP", "BSP", "SSP", "Job", "PacelineError", "Quorum", "Run", "Worker", "batch", "launch"]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that `import paceline` is quick and does not import torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{_HOMES[name]}.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
