"""Who takes part: arrival, departure, leases and incarnations. Pure: the time comes in with each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Member = tuple[Literal["worker", "server"], int]
"""A role and its index, as ("worker", 3)."""


def name(member: Member) -> str:
    """
    >>> name(("worker", 3))
    'worker 3'
    """
    return f"{member[0]} {member[1]}"


# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrive:
    """A process says who it is. A restarted process comes with a higher incarnation."""

    member: Member
    incarnation: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Something was heard from a member."""

    member: Member
    now_s: float


@dataclass(frozen=True, slots=True)
class Depart:
    """A member goes, for a stated reason: it finished, or its link closed."""

    member: Member
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    now_s: float


Event = Arrive | Seen | Depart | Tick

# Actions --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    member: Member
    incarnation: int


@dataclass(frozen=True, slots=True)
class Refused:
    member: Member
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    member: Member
    incarnation: int
    reason: str


Action = Admitted | Refused | Gone


@dataclass(slots=True)
class Roster:
    """The members and when each was last heard. `newest` keeps the highest incarnation ever admitted of each."""

    lease_s: float
    seen_s: dict[Member, float] = field(default_factory=dict)
    newest: dict[Member, int] = field(default_factory=dict)
    ticked_s: float | None = None


def step(roster: Roster, event: Event) -> list[Action]:
    """Take one event into the roster and say what follows.

    A member unheard for `lease_s` is gone. When the clock itself jumped by more than half a lease between two ticks
    (this process was suspended), all leases begin anew: what the members sent meanwhile was not read yet.
    """
    match event:
        case Arrive(member, incarnation, now_s):
            known = roster.newest.get(member, -1)
            if incarnation <= known:
                return [Refused(member, incarnation, f"{name(member)} is already known as incarnation {known}")]
            actions: list[Action] = []
            if member in roster.seen_s:
                actions.append(Gone(member, known, f"replaced by incarnation {incarnation}"))
            roster.newest[member] = incarnation
            roster.seen_s[member] = now_s
            return [*actions, Admitted(member, incarnation)]
        case Seen(member, now_s):
            if member in roster.seen_s:
                roster.seen_s[member] = max(now_s, roster.seen_s[member])
        case Depart(member, incarnation, reason):
            if member in roster.seen_s and roster.newest[member] == incarnation:
                del roster.seen_s[member]
                return [Gone(member, incarnation, reason)]
        case Tick(now_s):
            before, roster.ticked_s = roster.ticked_s, now_s
            if before is not None and now_s - before > roster.lease_s / 2:
                roster.seen_s = dict.fromkeys(roster.seen_s, now_s)
            silent = [m for m, seen_s in roster.seen_s.items() if now_s - seen_s > roster.lease_s]
            return [_expire(roster, member, now_s) for member in sorted(silent)]
    return []


def _expire(roster: Roster, member: Member, now_s: float) -> Gone:
    silent_s = now_s - roster.seen_s.pop(member)
    reason = f"silent for {silent_s:.1f} s (lease {roster.lease_s:g} s)"
    return Gone(member, roster.newest[member], reason)


def is_current(roster: Roster, member: Member, incarnation: int) -> bool:
    """Whether this incarnation of the member is the one that takes part."""
    return member in roster.seen_s and roster.newest[member] == incarnation
