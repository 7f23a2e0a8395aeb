"""Asynchronous parallel: nobody waits for anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from paceline.errors import JobError, nearest
from paceline.policies.core import Action, Policy, State, merge, register, release

Staleness = Literal["none", "inverse", "compensate"]


@register
@dataclass(frozen=True)
class ASP(Policy):
    """Each contribution is an update of its own, at once; `staleness` says what is done about late ones.

    With tau, the number of updates between the read and the use:

    - "none": nothing;
    - "inverse": the learning rate of the update is divided by max(1, tau) (Zhang et al., "Staleness-aware Async-SGD",
      2016, arXiv 1511.05950);
    - "compensate": the gradient becomes g + lam * g * g * (w_now - w_read), elementwise (DC-ASGD: Zheng et al., 2017,
      arXiv 1609.08326). Shards then keep a copy of the values that each worker read.

    Raises JobError for an unknown rule or a negative `lam`.
    """

    staleness: Staleness = "none"
    lam: float = 0.04
    kind: ClassVar[str] = "asp"

    def __post_init__(self) -> None:
        rules = list(get_args(Staleness))
        if self.staleness not in rules:
            raise JobError(f"asp staleness = {self.staleness!r}", nearest(str(self.staleness), rules))
        if not self.lam >= 0:
            raise JobError(f"asp lam = {self.lam}", "lam must be 0 (no compensation) or more")

    @property
    def needs_read(self) -> bool:
        return self.staleness == "compensate" and self.lam > 0

    def settle(self, state: State) -> list[Action]:
        if not state.pending:
            return []
        (contribution,) = state.pending.values()
        tau = state.version - contribution.version
        lr_scale = 1 / max(1, tau) if self.staleness == "inverse" else 1.0
        lam = self.lam if self.needs_read else 0.0
        return merge(state, lr_scale, lam) + release(state, {contribution.worker})
