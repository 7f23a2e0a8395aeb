"""Bulk synchronous parallel: every step waits for every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.policies.core import Action, Policy, State, merge, register, release


@register
@dataclass(frozen=True)
class BSP(Policy):
    """One update a step, of all active workers' gradients, weighted by examples; then all go on together.

    The same mathematics as one process on the whole batch. As slow as the slowest worker.
    Valiant, "A bridging model for parallel computation", 1990.

    >>> BSP()
    BSP()
    """

    kind: ClassVar[str] = "bsp"
    assignment: ClassVar[str] = "fixed"

    def settle(self, state: State) -> list[Action]:
        if not state.pending or len(state.pending) < state.active_count or not state.active <= state.pending.keys():
            return []
        return merge(state) + release(state, set(state.waiting))
