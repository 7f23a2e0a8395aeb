"""The whole protocol without time: coordinator, shards and workers over links that keep their own order and no other.

Whoever plays picks which link delivers next, who dies and who joins; the world checks all along what must always hold.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.exchange import messages as m
from paceline.exchange import shard as shards
from paceline.exchange.coordinator import Coordinator, End, Out, Record, To
from paceline.policies import SSP, Policy, Quorum
from paceline.policies.core import NO_WEIGHT, Action, Arrived, Contribution, Discard, Event, Key, State, Update
from paceline.simulate import worker as virtual
from paceline.state.layout import lay_out
from paceline.state.spec import ModelSpec, OptimizerSpec, TensorSpec

OPTIMIZER = OptimizerSpec("torch.optim.sgd:SGD", ({},), elementwise=True)
SPEC = ModelSpec((TensorSpec("weight", (11,), "uint8", 0),), (), OPTIMIZER)
PIECE_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """What a world is like. `own`: batches of their own that workers bring, instead of shared examples. The rest are
    probabilities: that a message of a contribution comes again later, a gradient is not finite, a step clips, a worker
    breaks out of an epoch."""

    policy: Policy
    workers: int = 3
    servers: int = 2
    examples: int = 12
    batch: int = 2
    epochs: int = 2
    assignment: str = "dynamic"
    on_loss: str = "continue"
    accumulate: int = 1
    own: tuple[int, ...] = ()
    twice: float = 0.0
    bad: float = 0.0
    clips: float = 0.0
    breaks: float = 0.0
    seed: int = 0


class Closed(m.Message, frozen=True):
    """The end of a link."""


class Worker(virtual.Worker):
    """A worker that meets bad gradients, clips, breaks out of epochs, and may bring its own data."""

    def __init__(self, world: World, rank: int, incarnation: int) -> None:
        setting = world.setting
        data = m.DataSpec() if setting.own else m.DataSpec(setting.examples, setting.batch)
        register = m.Register(SPEC, data)
        super().__init__(rank, incarnation, register, world.layout, setting.epochs, setting.accumulate)
        self.world = world
        self.own_left = self._own()

    def _own(self) -> int:
        own = self.world.setting.own
        return own[self.rank % len(own)] if own else 0

    def computed(self) -> list[virtual.Action]:
        announce, *pushes = super().computed()
        assert isinstance(announce, virtual.Say)
        setting, rng = self.world.setting, self.world.rng
        assert isinstance(announce.message, m.Announce)
        said = announce.message
        if setting.own:
            said = msgspec.structs.replace(said, weight=float(1 + self.rank))
        if rng.random() < setting.clips:
            said = msgspec.structs.replace(said, max_norm=0.5)
        if rng.random() < setting.bad:
            said, pushes = msgspec.structs.replace(said, pushed=False), []
        return [virtual.Say(0, said), *pushes]

    def _draw(self) -> list[virtual.Action]:
        setting = self.world.setting
        if not self.grants and self.epoch < setting.epochs - 1 and self.world.rng.random() < setting.breaks:
            self.world.broke = True
            self.epoch += 1
            self.own_left = self._own()
        if not setting.own:
            return super()._draw()
        if self.own_left:
            self.own_left -= 1
            return self._compute()
        self.own_left = self._own()
        self.doing = "standing"
        return [virtual.Say(0, m.Take(self.epoch, wait=True))]


class Spy:
    """A policy that is watched: what holds of each of its decisions, and when each contribution ended."""

    def __init__(self, policy: Policy, clipped: bool) -> None:
        self.policy = policy
        self.needs_read = policy.needs_read
        self.arrived: dict[Key, Contribution] = {}
        self.clock_of: dict[Key, int] = {}
        self.update_of: dict[Key, int] = {}
        self.discards: dict[Key, str] = {}
        self.sizes: list[int] = []

    def initial(self) -> State:
        return self.policy.initial()

    def step(self, state: State, event: Event) -> list[Action]:
        if isinstance(event, Arrived):
            contribution = event.contribution
            assert contribution.key not in self.arrived, "a retry does not count twice"
            self.arrived[contribution.key] = contribution
            self.clock_of[contribution.key] = state.clocks[contribution.worker]
            if isinstance(self.policy, SSP):
                self._check_read(self.policy.slack, contribution)
        actions = self.policy.step(state, event)
        for action in actions:
            if isinstance(action, Update):
                self._check_update(action, state, actions)
                for part in action.parts:
                    self._end(part.contribution)
                    self.update_of[part.contribution.key] = action.version
            elif isinstance(action, Discard):
                self._end(action.contribution)
                self.discards[action.contribution.key] = action.reason
        if isinstance(self.policy, SSP) and state.active:
            floor = min(state.clocks[worker] for worker in state.active)
            ahead = [state.clocks[worker] - floor for worker in state.active - state.waiting.keys()]
            assert max(ahead, default=0) <= self.policy.slack, "who computes is within the slack"
        return actions

    def _check_read(self, slack: int, contribution: Contribution) -> None:
        clock = self.clock_of[contribution.key]
        for key, step in self.clock_of.items():
            if step <= clock - slack - 1 and key not in self.discards:
                assert self.update_of.get(key, contribution.version + 1) <= contribution.version, "read too old"

    def _check_update(self, update: Update, state: State, actions: list[Action]) -> None:
        workers = [part.contribution.worker for part in update.parts]
        assert workers == sorted(set(workers)), "distinct workers, in order"
        total = sum(part.contribution.weight for part in update.parts)
        for part in update.parts:
            assert part.coefficient == part.contribution.weight / total
            if self.policy.kind in ("bsp", "quorum") or self.policy == SSP(0):
                assert part.staleness == 0, "a late gradient is never applied"
        if isinstance(self.policy, Quorum):
            weightless = sum(isinstance(a, Discard) and a.reason == NO_WEIGHT for a in actions)
            assert len(workers) == min(self.policy.k, state.active_count - weightless), "exactly k, or all"

    def _end(self, contribution: Contribution) -> None:
        assert contribution.key in self.arrived
        assert contribution.key not in self.update_of, "none is applied twice"
        assert contribution.key not in self.discards


@dataclass
class Host:
    """A server's shard, and what its driver keeps: payloads by key, and all orders that it carried out."""

    shard: shards.Shard
    payloads: dict[Key, set[int]] = field(default_factory=dict)
    orders: list[m.Message] = field(default_factory=list)
    reduced: int = 0


Link = tuple[Any, Any]


class World:
    """Processes and the links between them. A worker is itself an end of a link, so a new incarnation has new links."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.layout = lay_out(SPEC, setting.servers, PIECE_BYTES)
        self.spy = Spy(setting.policy, setting.clips > 0)
        self.coordinator = Coordinator(
            setting.workers,
            setting.servers,
            self.spy,  # type: ignore[arg-type]
            setting.assignment,
            lease_s=10.0,
            start_s=60.0,
            on_loss=setting.on_loss,
            piece_bytes=PIECE_BYTES,
        )
        self.links: dict[Link, deque[m.Message]] = {}
        self.echoes: dict[Link, m.Message] = {}
        self.hosts: dict[int, Host] = {}
        self.workers: dict[int, Worker] = {}
        self.greeted: dict[tuple[int, int], Worker] = {}
        self.computing: set[Worker] = set()
        self.finished: set[Worker] = set()
        self.dead: set[Worker] = set()
        self.joined: set[Worker] = set()
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.grants: dict[tuple[int, int], m.Granted] = {}
        self.grants_of: dict[Key, tuple[int, ...]] = {}
        self.used: dict[int, Counter[int]] = {}
        self.gave_back: list[m.Granted] = []
        self.broke = False
        self.end: End | None = None
        for index in range(setting.servers):
            self._decide(self.coordinator.arrive(("server", index), 0, 0.0))
        for rank in range(setting.workers):
            self.join(rank)

    # What a player may do ---------------------------------------------------------------------------------------------

    def busy(self) -> list[Link]:
        """The links on which something is under way."""
        return [link for link, queue in self.links.items() if queue]

    def deliver(self, link: Link) -> None:
        source, target = link
        message = self.links[link].popleft()
        if isinstance(target, Worker):
            if target not in self.dead:
                self._do(target, target.hear(message))
        elif isinstance(source, Worker):
            self._take(target, source, message)
        elif target == 0 and isinstance(message, m.SetUp | m.Initialised | m.Staged | m.Reduced):
            self._decide(self.coordinator.receive(("server", source), 0, message, 0.0))
        else:
            self._obey(target, message)

    def compute(self, worker: Worker) -> None:
        self.computing.discard(worker)
        self._do(worker, worker.computed())

    def mortal(self) -> list[Worker]:
        """Workers that may die without the run's end: they train, and others do, or may come back."""
        running = self.coordinator.phase == "running"
        live = [w for w in self.workers.values() if w not in self.dead and w not in self.finished]
        trained = [w for w in live if w in self.joined]
        return trained if running and (len(trained) > 1 or self.setting.on_loss == "restart") else []

    def kill(self, worker: Worker) -> None:
        """The worker dies; of what it has sent, some of the last on each link is lost."""
        self.dead.add(worker)
        self.computing.discard(worker)
        for (source, target), queue in self.links.items():
            if source is worker:
                for _ in range(self.rng.randint(0, len(queue))):
                    queue.pop()
                if target == 0:
                    queue.append(Closed())

    def join(self, rank: int) -> None:
        """A worker comes: one more, or a lost one again."""
        old = self.workers.get(rank)
        assert old is None or old in self.dead
        worker = self.workers[rank] = Worker(self, rank, old.incarnation + 1 if old is not None else 0)
        self._do(worker, worker.prepare())

    def absent(self) -> list[int]:
        """Ranks that may join."""
        if self.coordinator.phase != "running":
            return []
        gone = [rank for rank, worker in self.workers.items() if worker in self.dead]
        return [*gone, *([len(self.workers)] if len(self.workers) < 6 else [])]

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self, pick: random.Random) -> None:
        """Deliver and compute all there is: the run must end, and end well."""
        for _ in range(20_000):
            if self.end is not None:
                return self.check_end()
            links, computing = self.busy(), sorted(self.computing, key=lambda w: w.rank)
            if links and (not computing or pick.random() < 0.8):
                self.deliver(pick.choice(links))
            elif computing:
                self.compute(pick.choice(computing))
            elif self.setting.on_loss == "restart" and not self.coordinator.registered:
                self.join(next(rank for rank, worker in self.workers.items() if worker in self.dead))
            else:
                raise AssertionError(f"deadlock: {[(w.rank, w.doing) for w in self.workers.values()]}")
        raise AssertionError(f"no end: {[(w.rank, w.doing) for w in self.workers.values()]}")

    def check_end(self) -> None:
        assert self.end == End(), self.end
        assert self.spy.arrived.keys() == self.spy.update_of.keys() | self.spy.discards.keys(), "none is lost"
        assert not self.coordinator.staged
        assert not self.coordinator.announced
        assert not self.coordinator.queue
        while links := [link for link in self.busy() if not isinstance(link[1], Worker)]:
            self.deliver(links[0])
        for host in self.hosts.values():
            assert host.orders == self.hosts[0].orders, "one order of events for all shards"
            assert not host.payloads, "nothing is kept that will not be used"
            assert not host.shard.staged
        if not self.setting.own and not self.broke:
            ended = [fields for kind, fields in self.records if kind == "epoch"]
            assert [fields["epoch"] for fields in ended] == list(range(self.setting.epochs))
        discards = [fields for kind, fields in self.records if kind == "discard"]
        assert Counter(f["reason"] for f in discards) == Counter(self.spy.discards.values()), "each is reported"

    # Inside -----------------------------------------------------------------------------------------------------------

    def _send(self, source: Any, target: Any, message: m.Message) -> None:
        queue = self.links.setdefault((source, target), deque())
        queue.append(message)
        if (source, target) in self.echoes and self.rng.random() < 0.5:
            queue.append(self.echoes.pop((source, target)))
        if isinstance(message, m.Announce | m.Push | m.Staged | m.Reduced) and self.rng.random() < self.setting.twice:
            self.echoes[source, target] = message

    def _do(self, worker: Worker, actions: list[virtual.Action]) -> None:
        for action in actions:
            match action:
                case virtual.Say(server, message):
                    if isinstance(message, m.Announce):
                        self.grants_of[worker.rank, worker.incarnation, message.step] = message.grants
                    self._send(worker, server, message)
                case virtual.Compute():
                    self.computing.add(worker)
                case virtual.Done():
                    self.finished.add(worker)

    def _take(self, index: int, source: Worker, message: m.Message) -> None:
        rank, incarnation = source.rank, source.incarnation
        match message:
            case m.Push(_, piece):
                self._act(index, shards.push(self.hosts[index].shard, rank, incarnation, message), piece)
            case m.Init(piece):
                self._act(index, shards.initialised(self.hosts[index].shard, piece))
            case m.Hello():
                self.greeted[index, rank] = source
                if index == 0:
                    self._decide(self.coordinator.arrive(("worker", rank), incarnation, 0.0))
                self._send(index, source, m.Hello("server", index))
            case Closed():
                self._decide(self.coordinator.close(("worker", rank), incarnation, "its link closed", 0.0))
            case _:
                self._decide(self.coordinator.receive(("worker", rank), incarnation, message, 0.0))

    def _decide(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case To(("server", 0), message):
                    self._obey(0, message)
                case To(("server", index), message):
                    self._send(0, index, message)
                case To((_, rank), message):
                    worker = self.greeted[0, rank]
                    if isinstance(message, m.Granted):
                        self.grants[rank, message.grant] = message
                    if isinstance(message, m.Go) and message.step == -1:
                        self.joined.add(worker)
                    self._send(0, worker, message)
                case Record(kind, fields):
                    self._record(kind, fields)
                case End():
                    self.end = out

    def _record(self, kind: str, fields: dict[str, Any]) -> None:
        self.records.append((kind, fields))
        if kind == "update":
            keys = [key for key, version in self.spy.update_of.items() if version == fields["version"]]
            ranges = [r for key in keys for r in self._count(key)]
            assert sorted(ranges) == sorted(tuple(r) for r in fields["ranges"])
        elif kind == "discard" and fields["reason"] == NO_WEIGHT:
            (key,) = [
                k for k, reason in self.spy.discards.items()
                if reason == NO_WEIGHT and k[0] == fields["worker"] and k[2] == fields["step"] and k in self.grants_of
                and k[1] == self.coordinator.roster.newest["worker", k[0]]
            ]  # fmt: skip
            self._count(key)
        elif kind == "epoch" and not self.setting.own:
            counted = self.used.get(fields["epoch"], Counter())
            assert sum(counted.values()) == fields["used"] + fields["skipped"]
            assert max(counted.values(), default=1) == 1, "no example is used twice"
            if not self.broke:
                assert counted.keys() == set(range(self.setting.examples)), "every example is used"

    def _count(self, key: Key) -> Iterator[tuple[int, int]]:
        granted = [self.grants[key[0], grant] for grant in self.grants_of[key]]
        for grant in granted:
            self.used.setdefault(grant.epoch, Counter()).update(range(grant.start, grant.stop))
        return iter([(grant.start, grant.stop) for grant in granted])

    def _obey(self, index: int, message: m.Message) -> None:
        if isinstance(message, m.Setup):
            mine = frozenset(piece.index for piece in self.layout.of_shard(index))
            self.hosts[index] = Host(shards.Shard(mine, set(mine)))
            self._send(index, 0, m.SetUp())
            if not mine:
                self._send(index, 0, m.Initialised())
        elif index in self.hosts and not isinstance(message, m.Close):
            self.hosts[index].orders.append(message)
            self._act(index, shards.order(self.hosts[index].shard, message))

    def _act(self, index: int, actions: list[shards.Action], piece: int = -1) -> None:
        host = self.hosts[index]
        for action in actions:
            match action:
                case shards.Store(key):
                    assert piece not in host.payloads.get(key, set()), "a repeat is not kept twice"
                    host.payloads.setdefault(key, set()).add(piece)
                case shards.Discard(keys):
                    for key in keys:
                        host.payloads.pop(key, None)
                case shards.Tell(message):
                    self._send(index, 0, message)
                case shards.Do(order):
                    self._carry_out(index, host, order)

    def _carry_out(self, index: int, host: Host, order: m.Message) -> None:
        match order:
            case m.Reduce(version, parts, norm):
                assert host.reduced == host.shard.version, "an update is applied before the next is reduced"
                host.reduced = version
                for key, _, _ in parts:
                    assert host.payloads.pop(key, set()) == host.shard.pieces, "a contribution is whole"
                if norm:
                    self._send(index, 0, m.Reduced(version, float(version)))
            case m.Apply(version, _, _, grad_scale):
                assert version == host.reduced
                assert grad_scale in (1.0, 0.5 / ((self.setting.servers * version) ** 0.5 + 1e-6)), (
                    "clipped by its norm"
                )
            case m.Send(rank, version):
                assert version == host.shard.version, "what is sent is of the version that it says"
                worker = self.greeted[index, rank]
                for piece in self.layout.of_shard(index):
                    self._send(index, worker, m.Values(version, piece.index))
            case m.Forget(rank, incarnation):
                assert not [key for key in host.payloads if key[:2] == (rank, incarnation)]
