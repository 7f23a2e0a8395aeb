"""Learning rates for other batch sizes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import JobError
from paceline.train.batch import scale_lr, warmup

RATES = st.floats(1e-6, 1e3)
SIZES = st.integers(1, 10**6)
RULES = st.sampled_from(["linear", "sqrt"])


def sgd(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates_of(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """The rates of each param group with which each step is made."""
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@given(lr=RATES, size=SIZES, rule=RULES)
def test_the_same_batch_keeps_the_rate(lr: float, size: int, rule: Any) -> None:
    assert scale_lr(lr, base_batch=size, batch=size, rule=rule) == lr


@given(lr=RATES, a=SIZES, b=SIZES, c=SIZES, rule=RULES)
def test_scaling_twice_is_scaling_once(lr: float, a: int, b: int, c: int, rule: Any) -> None:
    by_way_of_b = scale_lr(scale_lr(lr, base_batch=a, batch=b, rule=rule), base_batch=b, batch=c, rule=rule)
    assert by_way_of_b == pytest.approx(scale_lr(lr, base_batch=a, batch=c, rule=rule))


@given(lr=RATES, base=SIZES, batch=SIZES)
def test_the_rules_keep_what_they_are_named_for(lr: float, base: int, batch: int) -> None:
    linear = scale_lr(lr, base_batch=base, batch=batch)
    assert linear / batch == pytest.approx(lr / base)  # the step an example makes
    root = scale_lr(lr, base_batch=base, batch=batch, rule="sqrt")
    assert root**2 / batch == pytest.approx(lr**2 / base)  # the variance of an update


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rule": "squrt"}, "did you mean 'sqrt'"),
        ({"rule": None}, "unknown rule None"),
        ({"batch": 0}, "batch = 0"),
        ({"base_batch": -1}, "base_batch = -1"),
        ({"batch": 2.5}, "batch = 2.5"),
        ({"batch": True}, "batch = True"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"lr": float("inf")}, "lr = inf"),
    ],
)
def test_wrong_scaling_is_refused(changes: dict[str, Any], says: str) -> None:
    given = {"lr": 0.1, "base_batch": 8, "batch": 16, **changes}
    with pytest.raises(JobError, match=says):
        scale_lr(given.pop("lr"), **given)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("start", [0.0, 0.25, 1.0])
def test_warmup_is_a_line_that_ends_at_the_rate(steps: int, start: float) -> None:
    optimizer = sgd(0.5, 2.0)
    seen = rates_of(optimizer, warmup(optimizer, steps, start), steps + 3)
    shares = [start + (1 - start) * (k + 1) / steps for k in range(steps)] + [1.0] * 3
    flat = [rate for rates in seen for rate in rates]
    assert flat == pytest.approx([rate * share for share in shares for rate in (0.5, 2.0)])
    assert seen[steps - 1] == [0.5, 2.0]


def test_warmup_can_be_saved_and_loaded() -> None:
    optimizer = sgd(1.0)
    scheduler = warmup(optimizer, 4)
    rates_of(optimizer, scheduler, 2)
    again = sgd(1.0)
    resumed = warmup(again, 4)
    resumed.load_state_dict(scheduler.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert rates_of(again, resumed, 3) == rates_of(optimizer, scheduler, 3) == [[0.75], [1.0], [1.0]]


@pytest.mark.parametrize("steps", [0, -3, 1.5, True])
def test_warmup_over_no_steps_is_refused(steps: Any) -> None:
    with pytest.raises(JobError, match="warmup over"):
        warmup(sgd(1.0), steps)


@pytest.mark.parametrize("start", [-0.1, 1.1, float("nan")])
def test_warmup_from_no_share_is_refused(start: float) -> None:
    with pytest.raises(JobError, match="start is a share"):
        warmup(sgd(1.0), 4, start)


def test_scaling_needs_no_torch() -> None:
    code = (
        "import sys, paceline; paceline.batch.scale_lr(1.0, base_batch=1, batch=2); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
