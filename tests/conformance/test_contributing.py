"""The policy worked through in CONTRIBUTING.md is real: it registers, parses, simulates."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import job
from paceline.errors import JobError
from paceline.policies import REGISTRY
from paceline.simulate import simulate

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


@pytest.fixture
def partial() -> Iterator[None]:
    module = types.ModuleType("partial_from_contributing")
    sys.modules[module.__name__] = module
    code = TEXT.split("```python\n")[1].split("```")[0]
    exec(compile(code, "CONTRIBUTING.md", "exec"), vars(module))
    yield
    del REGISTRY["partial"], sys.modules[module.__name__]


@pytest.mark.usefixtures("partial")
def test_the_example_policy_works_everywhere_at_once() -> None:
    when = job.policy("partial:0.75")
    assert job.label(when) == "partial:0.75"
    assert job.policy(job.to_table(when)) == when
    with pytest.raises(JobError, match="share is above 0"):
        job.policy("partial:0")
    run = simulate(job.Job(workers=4, when=when, slow={3: 5.0}), examples=60, batch=1, compute_s=1.0)
    assert run.examples == 60
    assert run.seconds < simulate(job.Job(workers=4, slow={3: 5.0}), examples=60, batch=1, compute_s=1.0).seconds
