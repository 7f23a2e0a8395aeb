"""The event loop of a process: links, newcomers that must prove the job token, timers, calls from other threads."""

from __future__ import annotations

import contextlib
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
from paceline.wire.auth import ServerSide
from paceline.wire.frames import Allocate
from paceline.wire.link import Link

AUTH_TIMEOUT_S = 5.0
DRAIN_S = 2.0

Handler = Callable[[int], None]


class Loop:
    """Run by one thread; only `call_soon` and `stop` may be called from others. `idle_s` is the time it had nothing to
    do, `refused` the errors of peers that did not prove the token."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.refused: list[AuthError] = []
        self._selector = selectors.DefaultSelector()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._timers: list[_Timer] = []
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

    def modify(self, sock: socket.socket, events: int, handler: Handler) -> None:
        self._selector.modify(sock, events, handler)

    def unregister(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)

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
            except OSError:
                return  # it has gone again
            tune(sock)
            _Newcomer(self, sock, token, on_peer)

        self.register(listener, selectors.EVENT_READ, accept)

    # Time and threads -----------------------------------------------------------------------------------------------

    def call_soon(self, call: Callable[..., object], *args: Any) -> None:
        """Have the loop's thread make this call; calls are made in order."""
        self._calls.append((call, args))
        if threading.get_ident() != self._thread:
            with contextlib.suppress(BlockingIOError, OSError):
                self._wake_out.send(b"\0")

    def call_every(self, period_s: float, call: Callable[[], object]) -> None:
        """Make this call every `period_s` seconds."""
        self._timers.append(_Timer(call, period_s, time.monotonic() + period_s))

    def call_after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Make this call once, after `delay_s` seconds."""
        self._timers.append(_Timer(call, None, time.monotonic() + delay_s))

    def run(self) -> None:
        """Serve until `stop`; then send what is queued, for at most 2 s, and close everything."""
        self._thread = threading.get_ident()
        try:
            while not self._stopping:
                self._turn(self._timeout_s())
            deadline_s = time.monotonic() + DRAIN_S
            while any(link.pending_bytes for link in self._links) and time.monotonic() < deadline_s:
                self._turn(0.05)
        finally:
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
            present = self._selector.get_map().get(key.fd)  # an earlier handler may have ended this one's socket
            if present is not None and present.data == key.data:
                key.data(mask)
        for _ in range(len(self._calls)):
            call, args = self._calls.popleft()
            call(*args)
        now_s = time.monotonic()
        for timer in [timer for timer in self._timers if timer.at_s <= now_s]:
            if timer.period_s is None:
                self._timers.remove(timer)
            else:
                timer.at_s = now_s + timer.period_s
            timer.call()

    def _timeout_s(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, min(timer.at_s for timer in self._timers) - time.monotonic()) if self._timers else None

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)


class _Timer:
    def __init__(self, call: Callable[[], object], period_s: float | None, at_s: float) -> None:
        self.call = call
        self.period_s = period_s
        self.at_s = at_s


class _Newcomer:
    """A connection that has not proved the token yet."""

    def __init__(
        self, loop: Loop, sock: socket.socket, token: bytes, on_peer: Callable[[socket.socket], object]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._side = ServerSide(token)
        self._on_peer = on_peer
        self._settled = False
        sock.setblocking(False)
        loop.register(sock, selectors.EVENT_READ, self._ready)
        loop.call_after(AUTH_TIMEOUT_S, self._expire)
        try:
            sock.send(self._side.greeting)
        except OSError:
            self._drop()

    def _ready(self, _mask: int) -> None:
        try:
            data = self._sock.recv(self._side.missing)
            if not data:
                self._drop()
                return
            reply = self._side.feed(data)
            if reply is None:
                return
            self._sock.send(reply)
        except BlockingIOError:
            return
        except AuthError as error:
            self._loop.refused.append(error)
            self._drop()
            return
        except OSError:
            self._drop()
            return
        self._settled = True
        self._loop.unregister(self._sock)
        self._on_peer(self._sock)

    def _expire(self) -> None:
        if not self._settled:
            self._drop()

    def _drop(self) -> None:
        if not self._settled:
            self._settled = True
            self._loop.unregister(self._sock)
            self._sock.close()
