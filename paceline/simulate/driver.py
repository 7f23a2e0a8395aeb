"""The driver on virtual time: carries messages between the coordinator, the shards, and workers without a model."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import TimedOut
from paceline.exchange import messages as m
from paceline.exchange import shard as shards
from paceline.exchange.coordinator import Coordinator, End, Out, Record, To
from paceline.job import Job
from paceline.simulate import worker as workers
from paceline.simulate.faults import Event, Faults, Join, Kill, Pause
from paceline.simulate.worker import Worker
from paceline.state.layout import lay_out

Process = Worker | int
"""An end of a link: a worker, or the index of a server."""


class Closed(m.Message, frozen=True):
    """The last that comes over the link of a worker that has died."""


class Driver:
    """Keeps a heap of what happens when. A batch takes `compute_s(worker, step)`; a link carries one transfer after
    another, at `bandwidth_bits_per_s`, and what has left arrives `latency_s` later, in order."""

    def __init__(
        self,
        job: Job,
        register: m.Register,
        epochs: int,
        compute_s: Callable[[int, int], float],
        bandwidth_bits_per_s: float,
        latency_s: float,
        events: Sequence[Event],
    ) -> None:
        self.coordinator = Coordinator(
            job.workers, job.servers, job.when, job.dealing, job.lease_s, job.start_s, job.on_loss, job.piece_bytes
        )
        self.shards: dict[int, shards.Shard] = {}
        self.workers: dict[int, Worker] = {}
        self.greeted: dict[tuple[int, int], Worker] = {}
        self.now_s = 0.0
        self.log: list[tuple[float, str, dict[str, Any]]] = []
        self.end: End | None = None
        self.began_s: dict[Worker, float] = {}
        self.ended_s: dict[Worker, float] = {}
        self.busy_s: dict[Worker, float] = {}
        self._job = job
        self._register = register
        self._epochs = epochs
        self._compute_s = compute_s
        self._bandwidth_bits_per_s = bandwidth_bits_per_s
        self._latency_s = latency_s
        self._layout = lay_out(register.spec, job.servers, job.piece_bytes)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._links: dict[tuple[Process, Process], tuple[float, float]] = {}
        self._dead: dict[Worker, float] = {}
        self._due_s: dict[Worker, float] = {}
        self._frozen_s: dict[Worker, float] = {}
        self._backlog: dict[Worker, deque[m.Message]] = {}
        self._faults = next((event for event in events if isinstance(event, Faults)), Faults(0))
        self._rng = random.Random(self._faults.seed)
        for index in range(job.servers):
            self._decide(self.coordinator.arrive(("server", index), 0, 0.0))
        for rank in range(job.workers):
            self._at(0.0, self._start, rank)
        for event in events:
            match event:
                case Kill(rank, at_s):
                    self._at(at_s, self._kill, rank)
                case Join(rank, at_s):
                    self._at(at_s, self._start, rank)
                case Pause(rank, at_s, for_s):
                    self._at(at_s, self._pause, rank, for_s)

    def run(self) -> End:
        """Until the run has ended. Raises TimedOut when it has not, though nothing is left that could happen."""
        while self._heap and self.end is None:
            self.now_s, _, call, args = heapq.heappop(self._heap)
            call(*args)
        if self.end is None:
            doing = sorted({worker.doing for worker in self.workers.values()})
            raise TimedOut(
                f"the simulation stands still at {self.now_s:g} s, with workers that are {', '.join(doing) or 'gone'}",
                'with on_loss="restart", let lost workers join again',
            )
        return self.end

    def _at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (time_s, next(self._numbers), call, args))

    # Links ------------------------------------------------------------------------------------------------------------

    def _send(self, source: Process, target: Process, message: m.Message, nbytes: int = 0) -> None:
        if source == target:
            return self._at(self.now_s, self._deliver, source, target, message, self.now_s)
        left_s, arrived_s = self._links.get((source, target), (0.0, 0.0))
        for _ in range(2 if self._twice(message) else 1):
            left_s = max(self.now_s, left_s) + nbytes * 8 / self._bandwidth_bits_per_s
            late_s = self._rng.uniform(0.0, self._faults.delay_s) if self._faults.delay_s else 0.0
            arrived_s = max(arrived_s, left_s + self._latency_s + late_s)
            self._at(arrived_s, self._deliver, source, target, message, left_s)
        self._links[source, target] = left_s, arrived_s
        return None

    def _twice(self, message: m.Message) -> bool:
        named = isinstance(message, m.Announce | m.Push | m.Staged)
        return self._faults.duplicate > 0 and named and self._rng.random() < self._faults.duplicate

    def _deliver(self, source: Process, target: Process, message: m.Message, left_s: float) -> None:
        if isinstance(target, Worker):
            self._hear(target, message)
        elif isinstance(source, Worker):
            if left_s <= self._dead.get(source, left_s) or isinstance(message, Closed):
                self._take(target, source, message)
        elif target == 0 and isinstance(message, m.SetUp | m.Initialised | m.Staged | m.Reduced):
            self._decide(self.coordinator.receive(("server", source), 0, message, self.now_s))
        else:
            self._obey(target, message)

    # Servers ----------------------------------------------------------------------------------------------------------

    def _take(self, index: int, source: Worker, message: m.Message) -> None:
        """A worker says something to a server."""
        rank, incarnation = source.rank, source.incarnation
        match message:
            case m.Push():
                self._act(index, shards.push(self.shards[index], rank, incarnation, message))
            case m.Init(piece):
                self._act(index, shards.initialised(self.shards[index], piece))
            case m.Hello():
                self.greeted[index, rank] = source
                if index == 0:
                    self._decide(self.coordinator.arrive(("worker", rank), incarnation, self.now_s))
                self._send(index, source, m.Hello("server", index))
            case Closed():
                self._decide(self.coordinator.close(("worker", rank), incarnation, "it was killed", self.now_s))
            case _:
                self._decide(self.coordinator.receive(("worker", rank), incarnation, message, self.now_s))

    def _decide(self, outs: list[Out]) -> None:
        for out in outs:
            match out:
                case Record(kind, fields):
                    self.log.append((self.now_s, kind, fields))
                case To(("server", 0), message):
                    self._obey(0, message)
                case To(("server", index), message):
                    self._send(0, index, message)
                case To((_, rank), message):
                    self._send(0, self.greeted[0, rank], message)
                case End():
                    self.end = out

    def _obey(self, index: int, message: m.Message) -> None:
        """The coordinator says something to a shard."""
        if isinstance(message, m.Setup):
            mine = frozenset(piece.index for piece in self._layout.of_shard(index))
            self.shards[index] = shards.Shard(mine, set(mine))
            self._send(index, 0, m.SetUp())
        elif index in self.shards:
            self._act(index, shards.order(self.shards[index], message))

    def _act(self, index: int, actions: list[shards.Action]) -> None:
        for action in actions:
            match action:
                case shards.Tell(message):
                    self._send(index, 0, message)
                case shards.Do(m.Send(rank, version)):
                    for piece in self._layout.of_shard(index):
                        self._send(index, self.greeted[index, rank], m.Values(version, piece.index), piece.nbytes)

    # Workers ----------------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        incarnation = self.workers[rank].incarnation + 1 if rank in self.workers else 0
        self._kill(rank)
        worker = Worker(rank, incarnation, self._register, self._layout, self._epochs, self._job.accumulate)
        self.workers[rank] = worker
        self.began_s[worker], self.busy_s[worker] = self.now_s, 0.0
        self._do(worker, worker.prepare())

    def _do(self, worker: Worker, actions: list[workers.Action]) -> None:
        for action in actions:
            match action:
                case workers.Say(server, message, nbytes):
                    self._send(worker, server, message, nbytes)
                case workers.Compute(batches):
                    slow = self._job.slow.get(worker.rank, 1.0)
                    seconds = self._compute_s(worker.rank, worker.step) * batches * slow
                    self.busy_s[worker] += seconds
                    self._due_s[worker] = self.now_s + seconds
                    self._at(self.now_s + seconds, self._computed, worker)
                    if self._faults.kill and self._rng.random() < self._faults.kill:
                        self._at(self.now_s + 2 * seconds * self._rng.random(), self._kill, worker.rank, True)
                case workers.Done():
                    self.ended_s[worker] = self.now_s

    def _hear(self, worker: Worker, message: m.Message) -> None:
        """A server says something to a worker: in vain if it is dead, later if it is suspended."""
        if worker in self._frozen_s:
            self._backlog[worker].append(message)
        elif worker not in self._dead:
            self._do(worker, worker.hear(message))

    def _computed(self, worker: Worker) -> None:
        if worker in self._dead:
            return
        if self.now_s < self._due_s[worker]:
            self._at(self._due_s[worker], self._computed, worker)
        else:
            self._do(worker, worker.computed())

    def _kill(self, rank: int, spare_last: bool = False) -> None:
        worker = self.workers.get(rank)
        if worker is None or worker in self.ended_s:
            return
        if not spare_last or any(w is not worker and w not in self.ended_s for w in self.workers.values()):
            self._dead[worker] = self.ended_s[worker] = self.now_s
            self.busy_s[worker] -= max(0.0, self._due_s.get(worker, 0.0) - self.now_s)
            self._send(worker, 0, Closed())

    def _pause(self, rank: int, for_s: float) -> None:
        worker = self.workers.get(rank)
        if worker is None or worker in self.ended_s:
            return
        self._frozen_s[worker] = max(self.now_s + for_s, self._frozen_s.get(worker, 0.0))
        self._backlog.setdefault(worker, deque())
        if worker.doing == "computing":
            self._due_s[worker] += for_s
        self._at(self.now_s + for_s, self._resume, worker)
        if for_s > self._job.lease_s:
            for quarter in range(1, 7):
                self._at(self.now_s + quarter * self._job.lease_s / 4, self._tick)

    def _resume(self, worker: Worker) -> None:
        if self.now_s >= self._frozen_s.get(worker, float("inf")):
            del self._frozen_s[worker]
            for message in self._backlog.pop(worker):
                self._hear(worker, message)

    def _tick(self) -> None:
        """Those that live are heard, and the leases looked at."""
        for index in range(self._job.servers):
            self.coordinator.receive(("server", index), 0, m.Beat(), self.now_s)
        for worker in self.workers.values():
            if worker not in self._frozen_s and worker not in self._dead:
                self.coordinator.receive(("worker", worker.rank), worker.incarnation, m.Beat(), self.now_s)
        self._decide(self.coordinator.tick(self.now_s))
