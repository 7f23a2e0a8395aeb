"""Learning rates for other batch sizes: the scaling rules, and a warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from paceline.errors import JobError, nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

Rule = Literal["linear", "sqrt"]


def scale_lr(lr: float, *, base_batch: int, batch: int, rule: Rule = "linear") -> float:
    """The learning rate for updates of `batch` examples, given the rate `lr` that suits updates of `base_batch`.

    An update of `bsp` has all workers' examples, so `batch` is their number times a worker's batch; one of `asp` has a
    single worker's.

    - "linear": `lr * batch / base_batch`, for SGD, with a warm-up (Goyal et al., 2017, arXiv 1706.02677);
    - "sqrt": `lr * sqrt(batch / base_batch)`, which keeps the variance of the step (Krizhevsky, 2014, arXiv 1404.5997,
      section 5; Hoffer et al., 2017, arXiv 1705.08741), often used with adaptive optimizers.

    Raises JobError for an unknown rule, a rate that is not above 0 and finite, or sizes that are not whole numbers from
    1.

    >>> scale_lr(0.1, base_batch=256, batch=1024), scale_lr(0.1, base_batch=256, batch=1024, rule="sqrt")
    (0.4, 0.2)
    """
    if rule not in get_args(Rule):
        raise JobError(f"unknown rule {rule!r}", nearest(str(rule), list(get_args(Rule))))
    if not 0 < lr < float("inf"):
        raise JobError(f"lr = {lr}", "give a learning rate above 0")
    for key, size in (("base_batch", base_batch), ("batch", batch)):
        if not _is_count(size):
            raise JobError(f"{key} = {size!r}", f"{key} is a number of examples, 1 or more")
    ratio = batch / base_batch
    return float(lr * (ratio if rule == "linear" else ratio**0.5))


def warmup(optimizer: Optimizer, steps: int, start: float = 0.0) -> LambdaLR:
    """A scheduler that raises the learning rates of `optimizer` in a straight line over `steps` steps, from `start`
    times what they are now to the whole.

    Step k (from 0) is made with `lr * (start + (1 - start) * (k + 1) / steps)`: the first is one rise above the start,
    so that it is not wasted at a rate of 0; step `steps - 1` and all later ones are made with `lr`. Call the
    scheduler's `step()` after each `optimizer.step()`, and give it to `worker.prepare` with the optimizer.

    Raises JobError when `steps` is not a whole number from 1, or `start` is not in [0, 1].

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
    if not _is_count(steps):
        raise JobError(f"warmup over {steps!r} steps", "give a whole number of steps, 1 or more")
    if not 0 <= start <= 1:
        raise JobError(f"warmup from {start} of the rate", "start is a share of the rate, from 0 to 1")
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda k: start + (1 - start) * min(1.0, (k + 1) / steps))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
