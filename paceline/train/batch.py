"""Learning rates for other batch sizes: the scaling rules, and a warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from paceline.errors import JobError, nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, *, base_batch: int, batch: int, rule: Rule = "linear") -> float:
    """The learning rate for batches of `batch` examples (all workers' together), given one that suits `base_batch`.

    - "linear": `lr * batch / base_batch`, for SGD (Goyal et al., 2017, arXiv 1706.02677);
    - "sqrt": `lr * sqrt(batch / base_batch)`, which keeps the variance of the step, for adaptive optimizers
      (Krizhevsky, 2014, arXiv 1404.5997).

    Raises JobError for an unknown rule, or sizes below 1.

    >>> scale_lr(0.1, base_batch=256, batch=1024), scale_lr(0.1, base_batch=256, batch=1024, rule="sqrt")
    (0.4, 0.2)
    """
    if base_batch < 1 or batch < 1:
        raise JobError(f"base_batch = {base_batch}, batch = {batch}", "batch sizes are 1 or more")
    ratio = batch / base_batch
    if rule == "linear":
        return lr * ratio
    if rule == "sqrt":
        return float(lr * ratio**0.5)
    raise JobError(f"unknown rule {rule!r}", nearest(str(rule), ["linear", "sqrt"]))


def warmup(optimizer: Optimizer, steps: int, start: float = 0.0) -> LambdaLR:
    """A scheduler that raises the learning rate in a straight line over `steps` steps: step k (from 0) uses
    `lr * (start + (1 - start) * (k + 1) / steps)`, and from step `steps - 1` on the rate is `lr`. Call its `step()`
    after each optimizer step.

    Raises JobError when `steps` is below 1 or `start` not in [0, 1].

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> scheduler, rates = warmup(sgd, 4), []
    >>> for _ in range(5):
    ...     rates.append(sgd.param_groups[0]["lr"])
    ...     sgd.step()
    ...     scheduler.step()
    >>> rates
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    from torch.optim.lr_scheduler import LambdaLR

    if steps < 1:
        raise JobError(f"warmup over {steps} steps", "give 1 step or more")
    if not 0 <= start <= 1:
        raise JobError(f"warmup from {start} of the rate", "start is a share of the rate, from 0 to 1")
    return LambdaLR(optimizer, lambda k: start + (1 - start) * min(1.0, (k + 1) / steps))
