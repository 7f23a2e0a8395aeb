"""A server process: carries out what the shard, and on server 0 the coordinator, decide."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Callable, Iterator

from paceline import wire
from paceline.engines.spec import SCRIPT_MODULE
from paceline.errors import FrameError, PacelineError, ServerLost, by_name
from paceline.exchange import messages as m
from paceline.exchange import shard as shards
from paceline.exchange.coordinator import Coordinator, End, Out, Record, To
from paceline.job import Job
from paceline.members.roster import Member, name
from paceline.state.layout import Layout, Piece, lay_out
from paceline.state.store import ShardStore
from paceline.train.client import DECODER
from paceline.watch.events import EventLog
from paceline.wire import Link


class Peer:
    """Who is at the other end of a link."""

    def __init__(self, member: Member, incarnation: int) -> None:
        self.member = member
        self.incarnation = incarnation


class Server:
    """Server `index` of a job: one shard, and the coordinator where `index` is 0. `load_script` is called
    before an optimizer class that the script defines is looked up."""

    def __init__(
        self,
        index: int,
        job: Job,
        listener: socket.socket,
        token: bytes,
        log: EventLog,
        load_script: Callable[[], object],
    ) -> None:
        self.index = index
        self.job = job
        self.error: PacelineError | None = None
        self.aborted = False
        self._log = log
        self._load_script = load_script
        self._loop = wire.Loop()
        self._links: dict[Member, Link] = {}
        self._newest: dict[Member, int] = {("server", index): 0}
        self._home: Link | None = None
        self._apply_s = 0.0
        self._traffic = [0, 0]
        self._layout: Layout | None = None
        self._store: ShardStore | None = None
        self._shard: shards.Shard | None = None
        self._coordinator: Coordinator | None = None
        if index == 0:
            self._coordinator = Coordinator(
                workers=job.workers,
                servers=job.servers,
                policy=job.when,
                assignment=job.dealing,
                lease_s=job.lease_s,
                start_s=job.start_s,
                on_loss=job.on_loss,
                piece_bytes=job.piece_bytes,
            )
        self._loop.listen(listener, token, self._accept)

    def run(self, home: str = "", token: bytes = b"") -> None:
        """Serve until the run ends; `home` is the address of server 0. Raises what ended the run."""
        me: Member = ("server", self.index)
        if self._coordinator is not None:
            self._decide(self._coordinator.arrive(me, 0, self._now()))
        else:
            sock = wire.connect(home, token, self.job.start_s)
            self._home = self._loop.attach(sock, DECODER, on_message=self._on_home, on_closed=self._on_home_closed)
            self._loop.call_soon(self._home.send, m.Hello("server", self.index))
        self._loop.call_every(self.job.lease_s / 4, self._tick)
        self._loop.call_every(0.25, self._log.flush)
        try:
            self._loop.run()
        finally:
            busy_in, busy_out = self._count()
            self._log.write(
                "end",
                updates=self._shard.version if self._shard else 0,
                apply_s=round(self._apply_s, 6),
                idle_s=round(self._loop.idle_s, 6),
                bytes_in=busy_in,
                bytes_out=busy_out,
            )
            self._log.flush()
        if self.error is not None:
            raise self.error

    # Links ------------------------------------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> None:
        self._loop.attach(
            sock, DECODER, on_message=self._on_message, on_closed=self._on_closed, allocate=self._allocate
        )

    def _allocate(self, message: m.Message, nbytes: int) -> memoryview:
        """Room for a payload; only pieces that this shard holds may bring one, of at most the piece's size."""
        if isinstance(message, m.Push | m.Init) and nbytes <= self._piece(message.piece).nbytes:
            return memoryview(bytearray(nbytes))
        raise FrameError(f"{type(message).__name__} with a payload of {nbytes} bytes was not expected")

    def _on_message(self, link: Link, message: m.Message, payload: memoryview | None) -> None:
        with self._guard():
            self._take(link, message, payload)

    def _take(self, link: Link, message: m.Message, payload: memoryview | None) -> None:
        if isinstance(message, m.Hello):
            return self._greet(link, message)
        peer: Peer | None = link.peer
        if peer is None:
            raise FrameError(f"{type(message).__name__} came before Hello")
        match message:
            case m.Push() if self._shard is not None:
                self._piece(message.piece)
                self._act(shards.push(self._shard, peer.member[1], peer.incarnation, message), payload)
            case m.Init(piece) if self._shard is not None and self._store is not None:
                self._store.set_values(self._piece(piece), payload if payload is not None else b"")
                self._act(shards.initialised(self._shard, piece))
            case _ if self._coordinator is not None:
                self._decide(self._coordinator.receive(peer.member, peer.incarnation, message, self._now()))
        return None

    def _greet(self, link: Link, hello: m.Hello) -> None:
        member: Member = (hello.role, hello.index)
        if link.peer is not None:
            raise FrameError("Hello came twice")
        if not 0 <= hello.index < (self.job.workers if hello.role == "worker" else self.job.servers):
            raise FrameError(f"this job has no {name(member)}")
        known = self._newest.get(member, -1)
        if hello.incarnation <= known:  # a process that was replaced: it must not take its successor's place
            what = f"{name(member)} is already here, as incarnation {known}"
            link.send(m.Abort("WorkerLost", what, "only one process may have this place"))
            return
        self._newest[member] = hello.incarnation
        link.peer = Peer(member, hello.incarnation)
        self._links[member] = link
        if self._coordinator is not None:
            self._decide(self._coordinator.arrive(member, hello.incarnation, self._now()))
        link.send(m.Hello("server", self.index))

    def _on_closed(self, link: Link, error: Exception | None) -> None:
        self._traffic[0] += link.bytes_in
        self._traffic[1] += link.bytes_out
        peer: Peer | None = link.peer
        if peer is None:
            return
        if self._links.get(peer.member) is link:
            del self._links[peer.member]
        if self._coordinator is not None:
            reason = str(error) if error is not None else "its link closed"
            self._decide(self._coordinator.close(peer.member, peer.incarnation, reason, self._now()))

    def _on_home(self, link: Link, message: m.Message, payload: memoryview | None) -> None:
        with self._guard():
            self._obey(message)

    def _on_home_closed(self, link: Link, error: Exception | None) -> None:
        reason = str(error) if error is not None else "it closed the link"
        self._stop(ServerLost(f"server 0 was lost: {reason}", "see its log; start the run again"))

    def _tick(self) -> None:
        if self._coordinator is not None:
            now_s = self._now()
            self._coordinator.receive(("server", 0), 0, m.Beat(), now_s)
            self._decide(self._coordinator.tick(now_s))
        elif self._home is not None:
            self._home.send(m.Beat())
            silent_s = self._now() - self._home.last_received
            if silent_s > 2 * self.job.lease_s:
                self._stop(ServerLost(f"server 0 was silent for {silent_s:.1f} s", "see its log; start the run again"))

    # Deciding and doing -----------------------------------------------------------------------------------------------

    def _decide(self, outs: list[Out]) -> None:
        """Carry out what the coordinator says, in order."""
        for out in outs:
            match out:
                case Record(kind, fields):
                    self._log.write(kind, **fields)
                case To(("server", self.index), message):
                    self._obey(message)
                case To(member, message):
                    if (link := self._links.get(member)) is not None:
                        link.send(message)
                case End(error, what, fix):
                    self._stop(by_name(error)(what, fix) if error else None)

    def _tell(self, message: m.Message) -> None:
        """Tell the coordinator, wherever it is."""
        if self._coordinator is not None:
            self._loop.call_soon(self._hear, message)
        elif self._home is not None:
            self._home.send(message)

    def _hear(self, message: m.Message) -> None:
        assert self._coordinator is not None
        with self._guard():
            self._decide(self._coordinator.receive(("server", 0), 0, message, self._now()))

    def _obey(self, message: m.Message) -> None:
        match message:
            case m.Setup():
                self._set_up(message)
            case m.Abort(error, what, fix):
                self.aborted = self._coordinator is None
                self._stop(by_name(error)(what, fix))
            case m.Close():
                self._stop(None)
            case m.Reduce() | m.Apply() | m.Send() | m.Drop() | m.Forget() if self._shard is not None:
                self._act(shards.order(self._shard, message))

    def _set_up(self, setup: m.Setup) -> None:
        if setup.spec.optimizer.cls.startswith(f"{SCRIPT_MODULE}:"):
            self._load_script()
        self._layout = lay_out(setup.spec, setup.shards, setup.piece_bytes)
        self._store = ShardStore(setup.spec, self._layout, self.index)
        mine = [piece for piece in self._layout.pieces if piece.shard == self.index]
        moving = frozenset(piece.index for piece in mine if piece.kind != "frozen")
        self._shard = shards.Shard(moving, {piece.index for piece in mine})
        self._tell(m.SetUp())

    def _act(self, actions: list[shards.Action], payload: memoryview | None = None) -> None:
        store = self._store
        assert store is not None
        for action in actions:
            match action:
                case shards.Store(key, push):
                    store.stage(key, self._piece(push.piece), push.present, payload if payload is not None else b"")
                case shards.Discard(keys):
                    for key in keys:
                        store.drop(key)
                case shards.Tell(message):
                    self._tell(message)
                case shards.Do(order):
                    self._do(store, order)

    def _do(self, store: ShardStore, order: m.Reduce | m.Apply | m.Send | m.Forget) -> None:
        began_s = time.perf_counter()
        match order:
            case m.Reduce(version, parts, norm):
                squared_norm = store.reduce(parts, norm)
                if norm:
                    self._tell(m.Reduced(version, squared_norm))
            case m.Apply(version, groups, lr_scale, grad_scale, max_value):
                store.apply(version, groups, lr_scale, grad_scale, max_value)
            case m.Send():
                self._send_values(store, order)
            case m.Forget(worker):
                store.forget(worker)
        self._apply_s += time.perf_counter() - began_s

    def _send_values(self, store: ShardStore, order: m.Send) -> None:
        if order.remember:
            store.remember(order.worker)
        link = self._links.get(("worker", order.worker))
        if link is None or self._layout is None:
            return
        for piece in self._layout.pieces:
            if piece.shard == self.index and (order.everything or piece.kind != "frozen"):
                link.send(m.Values(order.version, piece.index), [store.values(piece)])

    def _piece(self, index: int) -> Piece:
        """A piece of this shard. Raises FrameError for any other index."""
        if self._layout is None or not 0 <= index < len(self._layout.pieces):
            raise FrameError(f"there is no piece {index}")
        if (piece := self._layout.pieces[index]).shard != self.index:
            raise FrameError(f"piece {index} belongs to server {piece.shard}, not {self.index}")
        return piece

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A broken frame ends its link (the loop sees to that); any other error in here ends the run by name."""
        try:
            yield
        except FrameError:
            raise
        except Exception as error:
            traceback.print_exc()
            what = error.what if isinstance(error, PacelineError) else f"server {self.index}: {error!r}"
            failed = m.Failed(type(error).__name__, what, getattr(error, "fix", "see the server's log"))
            self._tell(failed)
            if self._home is not None:
                self._stop(by_name(failed.error)(failed.what, failed.fix))

    def _stop(self, error: PacelineError | None) -> None:
        self.error = self.error or error
        self._loop.stop()

    def _count(self) -> tuple[int, int]:
        links = [*self._links.values(), *([self._home] if self._home else [])]
        return (
            self._traffic[0] + sum(link.bytes_in for link in links),
            self._traffic[1] + sum(link.bytes_out for link in links),
        )

    @staticmethod
    def _now() -> float:
        return time.monotonic()
