"""The roster (who is here) and the ledger (who has which examples)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.members import ledger as books
from paceline.members import roster as people
from paceline.members.ledger import Ledger
from paceline.members.roster import Member, Roster, is_current

ONE: Member = ("worker", 1)
TWO: Member = ("worker", 2)
SERVER: Member = ("server", 0)


# The roster -----------------------------------------------------------------------------------------------------------


def roster(*members: Member, lease_s: float = 10.0) -> Roster:
    made = Roster(lease_s)
    for member in members:
        assert people.step(made, people.Arrive(member, 0, 0.0)) == [people.Admitted(member, 0)]
    return made


def ticks(made: Roster, *times_s: float) -> list[people.Action]:
    return [action for now_s in times_s for action in people.step(made, people.Tick(now_s))]


def test_silence_longer_than_the_lease_is_a_loss() -> None:
    made = roster(ONE, TWO)
    assert ticks(made, 0.0, 4.0, 8.0) == []
    people.step(made, people.Seen(TWO, 9.0))
    assert ticks(made, 10.0) == []
    (gone,) = ticks(made, 12.0)
    assert gone == people.Gone(ONE, 0, "silent for 12.0 s (lease 10 s)")
    assert not is_current(made, ONE, 0)
    assert is_current(made, TWO, 0)
    assert ticks(made, 16.0, 19.0) == []
    assert len(ticks(made, 20.0)) == 1


def test_what_was_heard_last_counts_however_it_is_ordered() -> None:
    made = roster(ONE)
    for now_s in (9.0, 3.0):
        people.step(made, people.Seen(ONE, now_s))
    assert ticks(made, 10.0, 14.0, 18.0) == []


def test_a_clock_that_stood_still_expires_nobody() -> None:
    made = roster(ONE, TWO)
    assert ticks(made, 2.0, 100.0) == [], "this process was suspended: it has not read what they sent"
    people.step(made, people.Seen(TWO, 101.0))
    assert ticks(made, 104.0, 108.0) == []
    assert [a.member for a in ticks(made, 111.0)] == [ONE]


def test_a_newer_incarnation_replaces_and_an_older_is_refused() -> None:
    made = roster(ONE)
    gone, admitted = people.step(made, people.Arrive(ONE, 1, 1.0))
    assert gone == people.Gone(ONE, 0, "replaced by incarnation 1")
    assert admitted == people.Admitted(ONE, 1)
    for old in (0, 1):
        assert [type(a) for a in people.step(made, people.Arrive(ONE, old, 2.0))] == [people.Refused]
    assert is_current(made, ONE, 1)
    assert not is_current(made, ONE, 0)


def test_a_late_farewell_of_an_old_self_changes_nothing() -> None:
    made = roster(ONE)
    people.step(made, people.Arrive(ONE, 1, 1.0))
    assert people.step(made, people.Depart(ONE, 0, "its link closed")) == []
    assert is_current(made, ONE, 1)
    assert people.step(made, people.Depart(ONE, 1, "finished")) == [people.Gone(ONE, 1, "finished")]
    assert people.step(made, people.Depart(ONE, 1, "its link closed")) == []
    assert people.step(made, people.Arrive(ONE, 1, 2.0)) != [people.Admitted(ONE, 1)], "an incarnation lives once"


def test_strangers_are_not_seen() -> None:
    made = roster(ONE)
    people.step(made, people.Seen(TWO, 1.0))
    people.step(made, people.Seen(SERVER, 1.0))
    assert made.seen_s.keys() == {ONE}


# The ledger, by example -----------------------------------------------------------------------------------------------


def ledger(examples: int, batch: int, workers: int, assignment: str = "dynamic", drop_last: bool = False) -> Ledger:
    made = Ledger(examples, batch, drop_last, assignment)  # type: ignore[arg-type]
    for worker in range(workers):
        assert books.step(made, books.Enter(worker)) == []
    return made


def take(made: Ledger, worker: int, epoch: int = 0, wait: bool = False) -> list[books.Action]:
    return books.step(made, books.Take(worker, epoch, wait))


def grant(made: Ledger, worker: int, epoch: int = 0) -> books.Granted:
    (granted,) = take(made, worker, epoch)
    assert isinstance(granted, books.Granted)
    return granted


def settle(made: Ledger, granted: books.Granted, fate: str = "used") -> list[books.Action]:
    return books.step(made, books.Settle(granted.worker, (granted.grant,), fate))  # type: ignore[arg-type]


def test_batches_go_to_whoever_asks() -> None:
    made = ledger(7, 3, 2)
    granted = [grant(made, 1), grant(made, 1), grant(made, 0)]
    assert [(g.start, g.stop) for g in granted] == [(0, 3), (3, 6), (6, 7)]
    assert take(made, 0) == [books.Empty(0)]
    assert take(made, 0, wait=True) == [books.Stalled(0)]
    assert settle(made, granted[0]) == settle(made, granted[1]) == []
    assert settle(made, granted[2]) == [books.EpochEnded(0, 7, 0), books.Resumed(0), books.Over(0, 0)]
    assert take(made, 1) == [books.Over(1, 0)]
    assert grant(made, 1, epoch=1).start == 0


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [3, 3, 1]), (True, [3, 3])])
def test_the_last_batch_is_short_or_dropped(drop_last: bool, sizes: list[int]) -> None:
    made = ledger(7, 3, 1, drop_last=drop_last)
    granted = [grant(made, 0) for _ in sizes]
    assert [g.stop - g.start for g in granted] == sizes
    assert take(made, 0) == [books.Empty(0)]


def test_what_comes_back_goes_to_one_that_stands_still() -> None:
    made = ledger(4, 2, 3)
    first, second = grant(made, 0), grant(made, 1)
    take(made, 2, wait=True)
    resumed, again = settle(made, first, "returned")
    assert resumed == books.Resumed(2)
    assert isinstance(again, books.Granted)
    assert (again.worker, again.start, again.stop) == (2, 0, 2)
    assert again.grant != first.grant, "what the first holder says of it later means nothing"
    assert settle(made, first) == []
    settle(made, second, "skipped")
    assert settle(made, again) == [books.EpochEnded(0, 2, 2)]


def test_what_a_lost_worker_held_goes_to_the_others() -> None:
    for assignment in ("dynamic", "fixed"):
        made = ledger(6, 1, 2, assignment)
        lost = [grant(made, 1), grant(made, 1)]
        mine = [grant(made, 0) for _ in range(3 if assignment == "fixed" else 4)]
        take(made, 0, wait=True)
        resumed, first = books.step(made, books.Exit(1))
        assert resumed == books.Resumed(0)
        assert isinstance(first, books.Granted)
        mine += [first, *(grant(made, 0) for _ in range(6 - len(mine) - 1))]
        assert sorted(g.start for g in mine) == list(range(6))
        assert [settle(made, g) for g in lost] == [[], []]
        assert [settle(made, g) for g in mine][-1] == [books.EpochEnded(0, 6, 0)]


def test_no_worker_left_does_not_end_the_epoch() -> None:
    made = ledger(3, 1, 1)
    settle(made, grant(made, 0))
    grant(made, 0)
    assert books.step(made, books.Exit(0)) == []
    books.step(made, books.Enter(0))
    again = [grant(made, 0), grant(made, 0)]
    assert sorted(g.start for g in again) == [1, 2]
    assert [settle(made, g) for g in again][-1] == [books.EpochEnded(0, 3, 0)]


def test_fixed_deals_batches_in_turn() -> None:
    made = ledger(11, 2, 3, "fixed")
    dealt = {w: [] for w in (2, 0, 1)}  # type: dict[int, list[int]]
    for worker in (2, 2, 1, 0, 1, 0):
        dealt[worker].append(grant(made, worker).start // 2)
    assert dealt == {0: [0, 3], 1: [1, 4], 2: [2, 5]}
    assert all(take(made, worker) == [books.Empty(worker)] for worker in range(3))


@pytest.mark.parametrize("assignment", ["dynamic", "fixed"])
def test_one_that_breaks_out_leaves_its_share_and_hangs_nobody(assignment: str) -> None:
    made = ledger(6, 1, 2, assignment)
    held = grant(made, 1)
    assert take(made, 1, epoch=1) == [books.Empty(1)], "no batch without a look at the newest version"
    assert take(made, 1, epoch=1, wait=True)[0] == books.Stalled(1)
    assert settle(made, held, "skipped") == [], "it came back when its holder went on"
    mine = [grant(made, 0) for _ in range(6)]
    assert sorted(g.start for g in mine) == list(range(6))
    for granted in mine[:-1]:
        assert settle(made, granted) == []
    ended, resumed, first = settle(made, mine[-1])
    assert (ended, resumed) == (books.EpochEnded(0, 6, 0), books.Resumed(1))
    assert isinstance(first, books.Granted)
    assert (first.worker, first.epoch) == (1, 1)


@pytest.mark.parametrize("assignment", ["dynamic", "fixed"])
def test_when_all_break_out_the_epoch_ends(assignment: str) -> None:
    made = ledger(6, 1, 2, assignment)
    settle(made, grant(made, 0))
    take(made, 0, epoch=1, wait=True)
    stalled, ended, *rest = take(made, 1, epoch=2, wait=True)
    assert (stalled, ended) == (books.Stalled(1), books.EpochEnded(0, 1, 0))
    assert [type(a) for a in rest] == [books.Resumed, books.Granted, books.Resumed, books.Stalled]
    assert isinstance(rest[1], books.Granted)
    assert (rest[1].worker, rest[1].epoch) == (0, 1)


def test_own_data_ends_when_all_have_run_out() -> None:
    made = ledger(0, 1, 3)
    assert take(made, 2, wait=True) == [books.Stalled(2)], "5, 7 and 0 batches"
    assert take(made, 0, wait=True) == [books.Stalled(0)]
    stalled, ended, *rest = take(made, 1, wait=True)
    assert (stalled, ended) == (books.Stalled(1), books.EpochEnded(0, 0, 0))
    assert {a for a in rest if isinstance(a, books.Over)} == {books.Over(worker, 0) for worker in range(3)}
    take(made, 0, epoch=1, wait=True)
    take(made, 1, epoch=1, wait=True)
    assert books.EpochEnded(1, 0, 0) in books.step(made, books.Exit(2))


def test_a_grant_settles_once_and_only_by_its_holder() -> None:
    made = ledger(4, 1, 2)
    granted = grant(made, 0)
    books.step(made, books.Settle(1, (granted.grant,), "used"))
    assert made.used == 0
    books.step(made, books.Settle(0, (granted.grant, granted.grant, 99), "used"))
    settle(made, granted)
    assert made.used == 1


# The ledger, under random schedules -----------------------------------------------------------------------------------


class Readers:
    """Workers that go through `epochs` epochs of a ledger as prepared loaders do."""

    def __init__(self, made: Ledger, workers: int, epochs: int) -> None:
        self.made = made
        self.epochs = epochs
        self.epoch = dict.fromkeys(range(workers), 0)
        self.doing = dict.fromkeys(range(workers), "drawing")
        self.held: dict[int, list[books.Granted]] = {worker: [] for worker in range(workers)}
        self.done: dict[int, Counter[int]] = {}
        self.ended: dict[int, books.EpochEnded] = {}
        self.broke = False
        self.newcomer = workers

    def step(self, event: books.Event) -> None:
        for action in books.step(self.made, event):
            match action:
                case books.Granted(worker, _, epoch):
                    assert epoch == self.epoch[worker]
                    assert self.doing[worker] in ("asking", "resumed")
                    self.held[worker].append(action)
                    self.doing[worker] = "drawing"
                case books.Empty(worker):
                    assert self.doing[worker] == "asking"
                    self.doing[worker] = "dry"
                case books.Stalled(worker):
                    assert self.doing[worker] in ("asking", "resumed")
                    self.doing[worker] = "standing"
                case books.Resumed(worker):
                    assert self.doing[worker] == "standing"
                    self.doing[worker] = "resumed"
                case books.Over(worker, epoch):
                    assert epoch == self.epoch[worker]
                    assert self.doing[worker] in ("asking", "resumed")
                    self.doing[worker] = "over"
                case books.EpochEnded(epoch, used, skipped):
                    assert epoch not in self.ended
                    self.ended[epoch] = action
                    done = self.done.get(epoch, Counter())
                    assert sum(done.values()) == used + skipped
                    assert max(done.values(), default=1) == 1, "none is used twice"
                    if not self.broke:
                        assert done.keys() == set(range(self.made.examples)), "each is used"
        standing = [w for w, doing in self.doing.items() if doing == "standing"]
        assert not standing or len(standing) < len(self.doing), "all stand still and none will wake them"

    def can(self) -> list[tuple[int, str]]:
        """What may happen next; the orderly things first."""
        moves: list[tuple[int, str]] = []
        for worker, doing in self.doing.items():
            moves += [(worker, fate) for fate in ("used", "returned", "skipped") if self.held[worker]]
            if doing == "drawing":
                moves.append((worker, "take"))
            elif doing == "dry" and not self.held[worker]:
                moves.append((worker, "wait"))
            elif doing == "over":
                moves.append((worker, "next"))
        return moves

    def move(self, worker: int, what: str) -> None:
        match what:
            case "take" | "wait":
                self.doing[worker] = "asking"
                self.step(books.Take(worker, self.epoch[worker], what == "wait"))
            case "used" | "returned" | "skipped":
                granted = self.held[worker].pop(0)
                if what != "returned":
                    done = self.done.setdefault(granted.epoch, Counter())
                    done.update(range(granted.start, granted.stop))
                self.step(books.Settle(worker, (granted.grant,), what))
            case "next" | "break":
                if what == "break":
                    self.broke = True
                    self.held[worker] = []  # without a word, which is the worst that it can do
                self.epoch[worker] += 1
                self.doing[worker] = "drawing"
                if self.epoch[worker] == self.epochs:
                    self.leave(worker)
            case "die":
                self.leave(worker)
            case "enter":
                self.epoch[self.newcomer], self.doing[self.newcomer], self.held[self.newcomer] = 0, "drawing", []
                self.step(books.Enter(self.newcomer))
                self.newcomer += 1

    def leave(self, worker: int) -> None:
        del self.epoch[worker], self.doing[worker]
        self.held[worker] = []
        self.step(books.Exit(worker))

    def finish(self) -> None:
        """Bring everybody through, a batch at a time."""
        while self.doing:
            moves = [m for m in self.can() if m[1] not in ("returned", "skipped")]
            assert moves, "none can move"
            self.move(*moves[0])


@given(
    assignment=st.sampled_from(["dynamic", "fixed"]),
    size=st.integers(1, 9),
    batch=st.integers(1, 3),
    workers=st.integers(1, 4),
    epochs=st.integers(1, 3),
    breaks=st.booleans(),
    schedule=st.lists(st.integers(0, 999), max_size=80),
)
@settings(max_examples=300, deadline=None)
def test_every_example_is_used_once(
    assignment: str, size: int, batch: int, workers: int, epochs: int, breaks: bool, schedule: list[int]
) -> None:
    readers = Readers(ledger(size, batch, workers, assignment), workers, epochs)
    for number in schedule:
        if not readers.doing:
            break
        moves = readers.can() * 3
        if len(readers.doing) > 1:
            moves += [(worker, "die") for worker in readers.doing]
        moves += [(0, "enter")] if readers.newcomer < 7 else []
        moves += [(w, "break") for w, doing in readers.doing.items() if doing in ("drawing", "dry")] if breaks else []
        readers.move(*moves[number % len(moves)])
    readers.finish()
    if not breaks:
        assert readers.ended.keys() == set(range(epochs))


@given(
    size=st.integers(1, 30),
    batch=st.integers(1, 4),
    workers=st.integers(1, 4),
    schedule=st.lists(st.integers(0, 3), max_size=200),
)
@settings(max_examples=100, deadline=None)
def test_fixed_equals_round_robin_in_any_order(size: int, batch: int, workers: int, schedule: list[int]) -> None:
    made = ledger(size, batch, workers, "fixed")
    dealt: dict[int, list[int]] = {worker: [] for worker in range(workers)}
    for number in [*schedule, *range(workers * size)]:
        for action in take(made, number % workers):
            if isinstance(action, books.Granted):
                dealt[action.worker].append(action.start)
    starts = list(range(0, size, batch))
    assert dealt == {worker: starts[worker::workers] for worker in range(workers)}
