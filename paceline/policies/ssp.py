"""Stale synchronous parallel: fast workers may run ahead, but not far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import JobError
from paceline.policies.core import Action, Policy, State, merge, register, release, slowest


@register
@dataclass(frozen=True)
class SSP(Policy):
    """A worker may begin a step while it is at most `slack` steps ahead of the slowest active worker. Contributions
    that came since the last update become one update whenever a worker is let on.

    A read at step c so sees every update of step c - slack - 1 and before, and `slack = 0` is BSP. Ho et al., "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.

    Raises JobError when `slack` is negative.
    """

    slack: int = 3
    kind: ClassVar[str] = "ssp"

    def __post_init__(self) -> None:
        if self.slack < 0:
            raise JobError(f"ssp slack = {self.slack}", "slack must be 0 (the same as bsp) or more steps")

    def settle(self, state: State) -> list[Action]:
        if not state.waiting:
            return []
        limit = slowest(state) + self.slack
        oldest, newest = next(iter(state.waiting)), next(reversed(state.waiting))
        if state.clocks[newest] > limit:  # then so are all that wait: nobody gets further ahead than limit + 1
            return []
        if state.clocks[oldest] > limit:  # the slowest has not moved: only the newest may go on
            return merge(state) + release(state, {newest})
        return merge(state) + release(state, {worker for worker in state.waiting if state.clocks[worker] <= limit})
