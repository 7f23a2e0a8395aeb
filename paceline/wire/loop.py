"""The event loop of a process: links, newcomers, timers, calls from other threads."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import AuthError
from paceline.wire.address import tune
from paceline.wire.frames import Allocate
from paceline.wire.link import Link
from paceline.wire.newcomer import Newcomer

AUTH_TIMEOUT_S = 5.0
DRAIN_S = 2.0
ACCEPT_PAUSE_S = 0.1
"""How long nobody is accepted after the process ran out of file descriptors or memory."""

Handler = Callable[[int], None]
Call = Callable[..., object]


def raise_unowned(error: Exception, link: Link | None) -> None:
    """Raise an error that no link can be blamed for."""
    if link is None:
        raise error


class Loop:
    """Run by one thread; only `call_soon` and `stop` may be called from others. `idle_s` is the time it had nothing to
    do, `refused` the latest errors of peers that did not prove the token.

    `on_error(error, link)` hears of each exception that a handler of a link raised, before the link is closed with it,
    and of those in any other call (`link` is None). What it raises comes out of `run`: by default, the latter.
    """

    def __init__(self, on_error: Callable[[Exception, Link | None], object] = raise_unowned) -> None:
        self.on_error = on_error
        self.idle_s = 0.0
        self.refused: deque[AuthError] = deque(maxlen=100)
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[tuple[Call, tuple[Any, ...]]] = deque()
        self._timers: list[tuple[float, int, Call, float | None]] = []
        self._order = itertools.count()
        self._links: list[Link] = []
        self._stopping = False
        self._thread: int | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.register(self._wake_in, selectors.EVENT_READ, self._woken)

    # Sockets --------------------------------------------------------------------------------------------------------

    def register(self, sock: socket.socket, events: int, handler: Handler) -> None:
        self._selector.register(sock, events, handler)
        self._handlers[sock.fileno()] = handler

    def modify(self, sock: socket.socket, events: int, handler: Handler) -> None:
        self._selector.modify(sock, events, handler)
        self._handlers[sock.fileno()] = handler

    def unregister(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._handlers[sock.fileno()]

    def attach(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Link, Any, memoryview | None], None],
        on_closed: Callable[[Link, Exception | None], None],
        allocate: Allocate | None = None,
        on_drained: Callable[[Link], None] | None = None,
    ) -> Link:
        """Make an authenticated socket a link."""
        self._links = [link for link in self._links if not link.closed]
        link = Link(self, sock, decoder, on_message, on_closed, allocate, on_drained)
        self._links.append(link)
        return link

    def listen(self, listener: socket.socket, token: bytes, on_peer: Callable[[socket.socket], object]) -> None:
        """Accept connections; `on_peer` gets the socket of each peer that has proved the token. The others are dropped,
        those that keep silent after 5 s."""
        listener.setblocking(False)

        def accept(_mask: int) -> None:
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return  # it has gone again
            except OSError:
                self.unregister(listener)
                self.call_after(ACCEPT_PAUSE_S, watch)
                return
            tune(sock)
            Newcomer(self, sock, token, on_peer, AUTH_TIMEOUT_S)

        def watch() -> None:
            self.register(listener, selectors.EVENT_READ, accept)

        watch()

    # Time and threads -----------------------------------------------------------------------------------------------

    def call_soon(self, call: Call, *args: Any) -> None:
        """Have the loop's thread make this call; calls are made in order."""
        self._calls.append((call, args))
        if threading.get_ident() != self._thread:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake_out.send(b"\0")

    def call_every(self, period_s: float, call: Call) -> None:
        """Make this call every `period_s` seconds."""
        self._set_timer(period_s, call, period_s)

    def call_after(self, delay_s: float, call: Call) -> None:
        """Make this call once, after `delay_s` seconds."""
        self._set_timer(delay_s, call, None)

    def run(self) -> None:
        """Serve until `stop`; then send what is queued, for at most 2 s, and close everything, which is not reported to
        the links' `on_closed`."""
        self._thread = threading.get_ident()
        try:
            while not self._stopping:
                self._turn(self._timeout_s())
            deadline_s = time.monotonic() + DRAIN_S
            while any(link.pending_bytes for link in self._links) and time.monotonic() < deadline_s:
                self._turn(0.05)
        finally:
            for link in self._links:
                link.abandon()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            self._wake_out.close()

    def stop(self) -> None:
        """End `run` soon."""
        self.call_soon(self._stop)

    def _stop(self) -> None:
        self._stopping = True

    def _turn(self, timeout_s: float | None) -> None:
        began_s = time.perf_counter()
        ready = self._selector.select(timeout_s)
        self.idle_s += time.perf_counter() - began_s
        for key, mask in ready:
            handler = self._handlers.get(key.fd)
            if handler is not None and handler is key.data:  # else an earlier handler ended this one's socket
                handler(mask)
        for _ in range(len(self._calls)):
            call, args = self._calls.popleft()
            self._make(call, *args)
        while self._timers and self._timers[0][0] <= time.monotonic():
            _, _, call, period_s = heapq.heappop(self._timers)
            if period_s is not None:
                self._set_timer(period_s, call, period_s)
            self._make(call)

    def _make(self, call: Call, *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self.on_error(error, None)

    def _set_timer(self, delay_s: float, call: Call, period_s: float | None) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), call, period_s))

    def _timeout_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)
