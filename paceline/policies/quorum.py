"""Synchronous updates with backup workers: a step waits for the first k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import JobError
from paceline.policies.core import LATE, Action, Discard, Policy, State, merge, register, release


@register
@dataclass(frozen=True)
class Quorum(Policy):
    """One update as soon as `k` distinct workers contributed to the present version; gradients that come later are
    discarded, and their worker goes on from the newest version.

    With fewer than `k` active workers, all of them make the quorum. A contribution without weight does not count. Chen
    et al., "Revisiting Distributed Synchronous SGD", 2016 (arXiv 1604.00981).

    Raises JobError when `k` is below 1.
    """

    k: int
    kind: ClassVar[str] = "quorum"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise JobError(f"quorum k = {self.k}", "k must be 1 or more: the number of workers a step waits for")

    def settle(self, state: State) -> list[Action]:
        if not state.pending:
            return []
        newest = next(reversed(state.pending.values()))
        if newest.version < state.version:  # the others are not late: each update takes all that are pending
            del state.pending[newest.worker]
            return [Discard(newest, LATE), *release(state, {newest.worker})]
        if len(state.pending) < min(self.k, state.active_count):
            return []
        empty = sum(not c.weight > 0 for c in state.pending.values())
        if len(state.pending) - empty < min(self.k, state.active_count - empty):
            return []
        return merge(state) + release(state, set(state.waiting))
