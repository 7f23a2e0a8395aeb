"""The sequencer: joins policy, roster and ledger into one pure machine that numbers updates.

It hears from workers and shards, and answers with messages to them. A contribution counts once every shard has staged
it whole; each update is the same set of contributions, with the same coefficients, on every shard, in one order. So any
version is one consistent cut over the shards, and what it decides depends on nothing but the order of what it heard.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.exchange import messages as m
from paceline.members import ledger as books
from paceline.members import roster as people
from paceline.members.roster import Member, name
from paceline.policies import core
from paceline.policies.core import Contribution, Key, Policy
from paceline.state.layout import lay_out
from paceline.state.spec import difference


@dataclass(frozen=True, slots=True)
class To:
    """Send `message` to `member`."""

    member: Member
    message: m.Message


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The run is over: well (`error` empty) or with an error of `paceline.errors`."""

    error: str = ""
    what: str = ""
    fix: str = ""


Out = To | Record | End


@dataclass(slots=True)
class Coordinator:
    """The coordinator's whole state. `phase` goes gathering, setting up, initialising, running, saving, ended; `owners`
    are the shards that hold any piece, `holders` those that hold pieces which change."""

    workers: int
    servers: int
    policy: Policy
    assignment: str
    lease_s: float
    start_s: float
    on_loss: str
    piece_bytes: int
    phase: str = "gathering"
    began_s: float | None = None
    empty_since_s: float | None = None
    roster: people.Roster = field(init=False)
    state: core.State = field(init=False)
    ledger: books.Ledger | None = None
    expected: set[int] = field(init=False)
    registered: dict[int, m.Register] = field(default_factory=dict)
    owners: frozenset[int] = frozenset()
    holders: frozenset[int] = frozenset()
    answers: set[int] = field(default_factory=set)
    digest: str = ""
    announced: dict[Key, m.Announce] = field(default_factory=dict)
    staged: dict[Key, set[int]] = field(default_factory=dict)
    last_step: dict[int, int] = field(default_factory=dict)
    fates: dict[int, tuple[int, str]] = field(default_factory=dict)
    queue: deque[m.Message] = field(default_factory=deque)
    norms: dict[int, float] | None = None
    saver: int | None = None

    def __post_init__(self) -> None:
        self.roster = people.Roster(self.lease_s)
        self.state = self.policy.initial()
        self.expected = set(range(self.workers))

    # What happens to it -----------------------------------------------------------------------------------------------

    def arrive(self, member: Member, incarnation: int, now_s: float) -> list[Out]:
        """A process has said hello."""
        out: list[Out] = []
        for action in people.step(self.roster, people.Arrive(member, incarnation, now_s)):
            match action:
                case people.Gone():
                    out += self._gone(action, now_s)
                case people.Refused(_, _, reason):
                    out.append(To(member, m.Abort("WorkerLost", reason, "a newer process has its place")))
        return out

    def receive(self, member: Member, incarnation: int, message: m.Message, now_s: float) -> list[Out]:
        """A message has come. What a replaced or lost process says is ignored."""
        if self.phase == "ended" or not people.is_current(self.roster, member, incarnation):
            return []
        people.step(self.roster, people.Seen(member, now_s))
        role, index = member
        if isinstance(message, m.Beat):
            return [To(member, message)]
        if isinstance(message, m.Failed):
            what = message.what if message.what.startswith(name(member)) else f"{name(member)}: {message.what}"
            return self._abort(message.error, what, message.fix)
        return self._from_worker(index, incarnation, message) if role == "worker" else self._from_shard(index, message)

    def close(self, member: Member, incarnation: int, reason: str, now_s: float) -> list[Out]:
        """A member's link has closed."""
        out: list[Out] = []
        for action in people.step(self.roster, people.Depart(member, incarnation, reason)):
            if isinstance(action, people.Gone):
                out += self._gone(action, now_s)
        return out

    def tick(self, now_s: float) -> list[Out]:
        """Time has passed: look at leases and at the start's time limit."""
        out: list[Out] = []
        if self.phase == "ended":
            return out
        if self.began_s is None:
            self.began_s = now_s
        for action in people.step(self.roster, people.Tick(now_s)):
            if isinstance(action, people.Gone):
                out += self._gone(action, now_s)
        if self.phase == "gathering" and now_s - self.began_s > self.start_s:
            missing = ", ".join(str(rank) for rank in sorted(self.expected))
            out += self._abort(
                "TimedOut",
                f"worker {missing} did not call prepare() within {self.start_s:g} s",
                "see its log; raise start_s if starting takes longer",
            )
        elif self.empty_since_s is not None and now_s - self.empty_since_s > self.start_s:
            out += self._abort("WorkerLost", f"no worker came back within {self.start_s:g} s", "see the workers' logs")
        return out

    # Messages ---------------------------------------------------------------------------------------------------------

    def _from_worker(self, rank: int, incarnation: int, message: m.Message) -> list[Out]:
        match message:
            case m.Register():
                return self._register(rank, incarnation, message)
            case m.Digest(digest):
                self.digest = self.digest or digest
                if digest != self.digest:
                    return self._abort(
                        "ModelError",
                        f"worker {rank} holds other initial values than the rest after the broadcast",
                        "a parameter is changed between prepare() and the first step, or shared between modules",
                    )
            case m.Take(epoch, wait):
                return self._ledger(books.Take(rank, epoch, wait))
            case m.GiveBack(grants, skip):
                return self._ledger(books.Settle(rank, grants, "skipped" if skip else "returned"))
            case m.Announce():
                key = (rank, incarnation, message.step)
                if message.step <= self.last_step.get(rank, -1):
                    return []
                self.announced[key] = message
                return self._complete(key)
            case m.Fetch():
                version = self.state.version
                return [*self._shards(self._send(rank, version)), To(("worker", rank), m.Now(version))]
            case m.Finished():
                return self._finished(rank, incarnation)
            case m.Saved() if rank == self.saver:
                return [_left(rank, incarnation, "finished"), *self._end()]
        return []

    def _from_shard(self, index: int, message: m.Message) -> list[Out]:
        match message:
            case m.SetUp() if self.phase == "setting up":
                self.answers.add(index)
                if len(self.answers) == self.servers:
                    self.phase, self.answers = "initialising", set()
                    return [To(("worker", min(self.registered)), m.Provide())]
            case m.Initialised() if self.phase == "initialising":
                self.answers.add(index)
                if self.answers >= self.owners:
                    self.phase = "running"
                    return [out for rank in sorted(self.registered) for out in self._admit(rank)]
            case m.Staged(key):
                if self._is_live(key) and key[2] > self.last_step.get(key[0], -1):
                    self.staged.setdefault(key, set()).add(index)
                    return self._complete(key)
            case m.Reduced(version, squared_norm) if self.norms is not None:
                return self._reduced(index, version, squared_norm)
        return []

    # Joining and leaving ----------------------------------------------------------------------------------------------

    def _register(self, rank: int, incarnation: int, message: m.Register) -> list[Out]:
        if self.phase == "saving":
            what = f"worker {rank} came back when the run was over"
            return [To(("worker", rank), m.Abort("WorkerLost", what, "nothing is left to do"))]
        if self.registered:
            first = min(self.registered)
            if (unlike := difference(self.registered[first].spec, message.spec)) is not None:
                return self._abort(
                    "ModelError",
                    f"worker {rank}'s model is not worker {first}'s: {unlike}",
                    "build the same model and optimizer on every worker",
                )
            ours, theirs = self.registered[first].data, message.data
            if ours != theirs:
                return self._abort(
                    "DataError",
                    f"worker {rank}'s loader has {theirs.examples} examples in batches of {theirs.batch}, worker "
                    f"{first}'s has {ours.examples} in batches of {ours.batch}",
                    "give every worker the same dataset and batch size, or data of its own with shard=False",
                )
        self.registered[rank] = message
        self.expected.discard(rank)
        self.empty_since_s = None
        if self.phase == "running":
            return self._admit(rank)
        return self._set_up() if self.phase == "gathering" and not self.expected else []

    def _set_up(self) -> list[Out]:
        """Everybody is here: tell the shards what they will hold."""
        self.phase = "setting up"
        first = self.registered[min(self.registered)]
        layout = lay_out(first.spec, self.servers, self.piece_bytes)
        self.owners = frozenset(piece.shard for piece in layout.pieces)
        self.holders = frozenset(piece.shard for piece in layout.pieces if piece.kind != "frozen")
        data = first.data
        fixed = self.assignment == "fixed"
        self.ledger = books.Ledger(data.examples, data.batch, data.drop_last, "fixed" if fixed else "dynamic")
        setup = m.Setup(first.spec, self.servers, self.piece_bytes)
        return [To(("server", index), setup) for index in range(self.servers)]

    def _admit(self, rank: int) -> list[Out]:
        """A registered worker takes part from the present version on."""
        incarnation = self.roster.newest[("worker", rank)]
        self.last_step[rank] = -1
        out: list[Out] = [Record("join", {"worker": rank, "incarnation": incarnation})]
        out += self._ledger(books.Enter(rank)) + self._policy(core.Joined(rank))
        version = self.state.version
        out += self._shards(self._send(rank, version, everything=True))
        return [*out, To(("worker", rank), m.Go(-1, version))]

    def _finished(self, rank: int, incarnation: int) -> list[Out]:
        others = bool(self.expected) or any(
            member[0] == "worker" and member[1] != rank for member in self.roster.seen_s
        )
        if rank not in self.registered or others:
            out = self._leave(rank, incarnation, "finished")
            out.append(To(("worker", rank), m.Bye(False, self.state.version)))
            if not others:
                return [*out, *self._end()]
            ready = self.phase == "gathering" and self.registered and not self.expected
            return out + (self._set_up() if ready else [])
        self.saver, self.phase = rank, "saving"
        out = self._shards(self._send(rank, self.state.version, everything=True))
        return [*out, To(("worker", rank), m.Bye(True, self.state.version))]

    def _leave(self, rank: int, incarnation: int, reason: str) -> list[Out]:
        """Take a worker out of everything; what it has staged is discarded, what it held goes back."""
        people.step(self.roster, people.Depart(("worker", rank), incarnation, reason))
        self.expected.discard(rank)
        if self.registered.pop(rank, None) is None:
            return []
        out: list[Out] = [_left(rank, incarnation, reason)]
        out += self._policy(core.Left(rank)) + self._ledger(books.Exit(rank))
        for unfinished in [key for key in self.announced if key[0] == rank]:
            del self.announced[unfinished]
        for unfinished in [key for key in self.staged if key[0] == rank]:
            del self.staged[unfinished]
        return out + self._shards(m.Forget(rank, incarnation))

    def _gone(self, gone: people.Gone, now_s: float) -> list[Out]:
        """A member was lost: it did not say that it had finished."""
        role, index = gone.member
        if self.phase == "ended":
            return []
        if role == "server":
            return self._abort(
                "ServerLost", f"server {index} was lost: {gone.reason}", "see its log; start the run again"
            )
        if self.phase == "saving" and index == self.saver:
            return self._abort("WorkerLost", f"worker {index} was lost while it saved: {gone.reason}", "see its log")
        early = self.phase not in ("running", "saving")
        if self.on_loss == "stop" or early:
            when = " before training began" if early else ""
            fix = "see its log" if early else 'see its log; on_loss="continue" goes on with the others'
            return self._abort("WorkerLost", f"worker {index} was lost{when}: {gone.reason}", fix)
        out = self._leave(index, gone.incarnation, gone.reason)
        if self.expected or any(member[0] == "worker" for member in self.roster.seen_s):
            return out
        if self.on_loss == "restart":
            self.empty_since_s = now_s
            return out
        return out + self._abort(
            "WorkerLost", f"no worker is left; the last, worker {index}: {gone.reason}", "see its log"
        )

    # Contributions, updates, data -------------------------------------------------------------------------------------

    def _is_live(self, key: Key) -> bool:
        return key[0] in self.registered and people.is_current(self.roster, ("worker", key[0]), key[1])

    def _complete(self, key: Key) -> list[Out]:
        """A contribution reaches the policy when it is announced and staged on every shard that holds pieces."""
        announce = self.announced.get(key)
        if announce is None or (announce.pushed and not self.staged.get(key, set()) >= self.holders):
            return []
        self.staged.pop(key, None)
        worker, incarnation, step = key
        self.last_step[worker] = step
        weight = announce.weight if announce.pushed else 0.0
        return self._policy(core.Arrived(Contribution(worker, incarnation, step, announce.version, weight)))

    def _policy(self, event: core.Event) -> list[Out]:
        out: list[Out] = []
        for action in self.policy.step(self.state, event):
            match action:
                case core.Update():
                    out += self._update(action)
                case core.Discard(contribution, reason):
                    out += self._discard(contribution, reason)
                case core.Release(worker, version):
                    staleness, discarded = self.fates.pop(worker, (0, ""))
                    out += self._shards(self._send(worker, version))
                    out.append(To(("worker", worker), m.Go(self.last_step[worker], version, staleness, discarded)))
        return out

    def _update(self, update: core.Update) -> list[Out]:
        announced = {part.contribution.key: self.announced.pop(part.contribution.key) for part in update.parts}
        furthest = announced[max(announced, key=lambda key: (key[2], -key[0]))]
        used = {key: books.ranges(self.ledger, a.grants) if self.ledger else [] for key, a in announced.items()}
        rows = [(p.contribution.worker, p.contribution.step, p.contribution.weight, p.staleness) for p in update.parts]
        fields: dict[str, Any] = {"version": update.version, "parts": rows, "lr_scale": update.lr_scale}
        fields["ranges"] = [r for found in used.values() for r in found]
        out: list[Out] = [Record("update", fields)]
        for part in update.parts:
            self.fates[part.contribution.worker] = (part.staleness, "")
        parts = tuple((p.contribution.key, p.coefficient, p.lam) for p in update.parts)
        clip = furthest.max_norm is not None
        out += self._shards(m.Reduce(update.version, parts, clip))
        groups, max_value = furthest.groups, furthest.max_value
        apply = m.Apply(update.version, groups, update.lr_scale, 1.0, max_value)
        if furthest.max_norm is not None:
            self.queue.append(_Clip(apply, furthest.max_norm))
            out += self._flush()
        else:
            out += self._shards(apply)
        for key, announce in announced.items():
            out += self._ledger(books.Settle(key[0], announce.grants, "used"))
        return out

    def _discard(self, contribution: Contribution, reason: str) -> list[Out]:
        announce = self.announced.pop(contribution.key, None)
        row = {
            "worker": contribution.worker,
            "step": contribution.step,
            "weight": contribution.weight,
            "reason": reason,
        }
        self.fates[contribution.worker] = (0, reason)
        out: list[Out] = [Record("discard", row), *self._shards(m.Drop(contribution.key))]
        if announce is not None and reason != core.LEFT:
            fate: Literal["skipped", "returned"] = "skipped" if reason == core.NO_WEIGHT else "returned"
            out += self._ledger(books.Settle(contribution.worker, announce.grants, fate))
        return out

    def _ledger(self, event: books.Event) -> list[Out]:
        out: list[Out] = []
        for action in books.step(self.ledger, event) if self.ledger else []:
            match action:
                case books.Granted(worker, grant, epoch, start, stop):
                    out.append(To(("worker", worker), m.Granted(grant, epoch, start, stop)))
                case books.Empty(worker):
                    out.append(To(("worker", worker), m.Empty(self.ledger.epoch)))  # type: ignore[union-attr]
                case books.Over(worker, epoch):
                    out.append(To(("worker", worker), m.Over(epoch)))
                case books.Stalled(worker):
                    out += self._policy(core.Paused(worker))
                case books.Resumed(worker):
                    out += self._policy(core.Resumed(worker))
                case books.EpochEnded(epoch, used, skipped):
                    size = self.ledger.size  # type: ignore[union-attr]
                    out.append(Record("epoch", {"epoch": epoch, "examples": size, "used": used, "skipped": skipped}))
        return out

    # The shards' queue: one order for all, held back while a norm is being summed -------------------------------------

    def _send(self, worker: int, version: int, everything: bool = False) -> m.Send:
        return m.Send(worker, version, everything, self.policy.needs_read)

    def _shards(self, message: m.Message) -> list[Out]:
        self.queue.append(message)
        return self._flush()

    def _flush(self) -> list[Out]:
        out: list[Out] = []
        while self.queue and self.norms is None:
            message = self.queue.popleft()
            if isinstance(message, m.Reduce) and message.norm:
                self.norms = {}
            out += [To(("server", index), message) for index in range(self.servers)]
        return out

    def _reduced(self, index: int, version: int, squared_norm: float) -> list[Out]:
        """Clip by the norm of the averaged gradient over all shards, as `torch.nn.utils.clip_grad_norm_` would."""
        clip = self.queue[0]
        assert isinstance(clip, _Clip)
        assert self.norms is not None
        if version == clip.apply.version:
            self.norms[index] = squared_norm
        if len(self.norms) < self.servers:
            return []
        self.queue.popleft()
        norm = sum(self.norms[index] for index in sorted(self.norms)) ** 0.5
        scale = min(1.0, clip.max_norm / (norm + 1e-6))
        self.norms = None
        self.queue.appendleft(clip.scaled(scale))
        return self._flush()

    # Ends -------------------------------------------------------------------------------------------------------------

    def _everybody(self, message: m.Message) -> list[Out]:
        return [To(member, message) for member in sorted(self.roster.seen_s)]

    def _end(self) -> list[Out]:
        self.phase = "ended"
        return [*[To(("server", index), m.Close()) for index in range(self.servers)], End()]

    def _abort(self, error: str, what: str, fix: str) -> list[Out]:
        self.phase = "ended"
        return [*self._everybody(m.Abort(error, what, fix)), End(error, what, fix)]


def _left(rank: int, incarnation: int, reason: str) -> Record:
    return Record("leave", {"worker": rank, "incarnation": incarnation, "reason": reason})


class _Clip(m.Message, frozen=True):
    """An `Apply` whose scale waits for the norm; it stays in the queue and is never sent."""

    apply: m.Apply
    max_norm: float

    def scaled(self, scale: float) -> m.Apply:
        a = self.apply
        return m.Apply(a.version, a.groups, a.lr_scale, scale, a.max_value)
