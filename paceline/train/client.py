"""A worker's links to the servers: a background thread runs the event loop, the main thread asks and waits.

Whatever the main thread waits for ends: with the answer, or with an error when the coordinator aborts, a link closes,
or the coordinator is silent for longer than the lease.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline import wire
from paceline.errors import FrameError, PacelineError, ServerLost, TimedOut, by_name
from paceline.exchange import messages as m
from paceline.wire import Link

DECODER = msgspec.msgpack.Decoder(m.MESSAGES)


class Client:
    """Links of one worker incarnation. The address at index 0 is that of the server that hosts the coordinator."""

    def __init__(self, rank: int, incarnation: int, addresses: Sequence[str], token: bytes, lease_s: float) -> None:
        self.rank = rank
        self.lease_s = lease_s
        self.error: PacelineError | None = None
        self.aborted = False
        self.sent_s = 0.0
        self.buffers: dict[int, memoryview] = {}
        self._hello = m.Hello("worker", rank, incarnation)
        self._addresses = addresses
        self._token = token
        self._loop = wire.Loop()
        self._links: list[Link] = []
        self._greeted = 0
        self._inbox: dict[type, deque[m.Message]] = {}
        self._arrived: dict[int, set[int]] = {}
        self._wanted = 0
        self._changed = threading.Condition()
        self._watched_s = time.monotonic()
        self._thread = threading.Thread(target=self._loop.run, name=f"paceline-worker-{rank}", daemon=True)

    # Main thread ------------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float, every_half_second: Callable[[], None]) -> None:
        """Connect to every server and greet it. Raises AddressError, AuthError or TimedOut."""
        for address in self._addresses:
            sock = wire.connect(address, self._token, timeout_s)
            self._links.append(
                self._loop.attach(
                    sock,
                    DECODER,
                    on_message=self._on_message,
                    on_closed=self._on_closed,
                    allocate=self._allocate,
                    on_drained=self._note_sent,
                )
            )
        self._loop.call_every(self.lease_s / 4, self._watch)
        self._loop.call_every(0.5, every_half_second)
        self._thread.start()
        for link in self._links:
            self._loop.call_soon(link.send, self._hello)
        self._wait(lambda: self._greeted == len(self._links), timeout_s, "the servers' greeting")

    def tell(self, message: m.Message) -> None:
        """Send a message to the coordinator."""
        self._loop.call_soon(self._links[0].send, message)

    def tell_shards(self, frames: Sequence[tuple[int, m.Message, Sequence[memoryview]]]) -> None:
        """Send (shard, message, payload) frames; the payload must stay unchanged until the shards have answered."""

        def send() -> None:
            for shard, message, payload in frames:
                self._links[shard].send(message, payload)
            self._note_sent()

        self._loop.call_soon(send)

    def wait_for(self, *kinds: type[m.Message]) -> Any:
        """The next message of one of these kinds from the coordinator."""

        def find() -> m.Message | None:
            return next((box.popleft() for kind in kinds if (box := self._inbox.get(kind))), None)

        return self._wait(find)

    def expect_pieces(self, sizes: dict[int, int]) -> None:
        """Make room for the values of these pieces (index: bytes), all of which come with each version."""
        self.buffers = {piece: memoryview(bytearray(size)) for piece, size in sizes.items()}

    def wait_for_pieces(self, version: int, pieces: set[int]) -> None:
        """Wait until the values of all `pieces` at `version` are in `buffers`."""
        self._wait(lambda: self._arrived.get(version, set()) >= pieces)
        self._arrived.clear()

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent on all links."""
        return sum(link.bytes_in for link in self._links), sum(link.bytes_out for link in self._links)

    def tell_failure(self, error: PacelineError) -> None:
        """Let the run know that this worker ends with an error."""
        if self._thread.is_alive() and self._links:
            self.tell(m.Failed(type(error).__name__, error.what, error.fix))

    def close(self) -> None:
        """Send what is still queued and end the loop."""
        if self._thread.is_alive():
            self._loop.stop()
            self._thread.join(timeout=5)

    def _wait(self, ready: Callable[[], object], timeout_s: float | None = None, what: str = "") -> object:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not (found := ready()):
                if self.error is not None:
                    raise self.error
                if deadline_s is not None and time.monotonic() > deadline_s:
                    raise TimedOut(f"worker {self.rank} waited {timeout_s:g} s for {what}", "see the servers' logs")
                self._changed.wait(timeout=self.lease_s if deadline_s is None else 0.5)
        return found

    # Loop thread ------------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: m.Message, payload: memoryview | None) -> None:
        if isinstance(message, m.Beat):
            return
        with self._changed:
            match message:
                case m.Hello():
                    self._greeted += 1
                case m.Abort(error, what, fix):
                    self.aborted = True
                    self._fail(by_name(error)(what, fix))
                case m.Values(version, piece):
                    self._arrived.setdefault(version, set()).add(piece)
                case _:
                    self._inbox.setdefault(type(message), deque()).append(message)
            self._changed.notify_all()

    def _on_closed(self, link: Link, error: Exception | None) -> None:
        server = self._links.index(link)
        reason = str(error) if error is not None else "it closed the link"
        with self._changed:
            self._fail(ServerLost(f"server {server} was lost: {reason}", "see its log; start the run again"))
            self._changed.notify_all()

    def _allocate(self, message: m.Message, nbytes: int) -> memoryview:
        room = self.buffers.get(message.piece) if isinstance(message, m.Values) else None
        if room is None or len(room) != nbytes:
            raise FrameError(f"{type(message).__name__} with a payload of {nbytes} bytes was not expected")
        return room

    def _note_sent(self, _link: Link | None = None) -> None:
        """Keep the time at which nothing was left to send."""
        if all(link.pending_bytes == 0 for link in self._links):
            self.sent_s = time.perf_counter()

    def _watch(self) -> None:
        """Say that this worker lives, and look whether the coordinator does. After this process itself was suspended,
        the coordinator has one more period to be heard."""
        now_s = time.monotonic()
        awake, self._watched_s = now_s - self._watched_s < self.lease_s / 2, now_s
        if self._greeted < len(self._links):
            return
        self._links[0].send(m.Beat())
        silent_s = now_s - self._links[0].last_received
        if awake and silent_s > self.lease_s:
            with self._changed:
                what = f"server 0 was silent for {silent_s:.1f} s (lease {self.lease_s:g} s)"
                self._fail(ServerLost(what, "see its log; start the run again"))
                self._changed.notify_all()

    def _fail(self, error: PacelineError) -> None:
        self.error = self.error or error
