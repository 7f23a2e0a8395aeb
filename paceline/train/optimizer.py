"""The user's optimizer and schedulers, as they stand in the loop after `prepare`: the step is the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class PreparedOptimizer(torch.optim.Optimizer):
    """Shares the param groups of the user's optimizer, so that schedulers built on either change both; `step` hands
    the gradients to the servers, which own the optimizer's state."""

    def __init__(self, inner: torch.optim.Optimizer, exchange: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self._inner = inner
        self._exchange = exchange

    def step(self, closure: Any = None) -> Any:
        """Contribute the gradients, wait to be let on, and take the new values in; within an accumulation window, only
        keep them. Raises what ended the run."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._exchange()
        self._inner._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at, before they warn
        return loss


class PreparedScheduler:
    """A learning-rate scheduler that moves once a step, not once a micro-batch of an accumulation window."""

    def __init__(self, inner: LRScheduler, is_due: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_due = is_due

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._is_due():
            self._inner.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
