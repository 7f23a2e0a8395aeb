"""A link: one authenticated socket in an event loop, sending and receiving frames."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.wire.frames import Allocate, FrameReader, encode_head

if TYPE_CHECKING:
    from paceline.wire.loop import Loop

TURN_BYTES = 4 << 20
"""What one link may read before the others get their turn."""

MAX_BUFFERS = 512
"""Buffers handed to the kernel at once."""

_encode = msgspec.msgpack.Encoder().encode


class Link:
    """All methods belong to the loop's thread. What is sent stays referenced, and must not change, until it is out.

    `peer` is the owner's to use; `last_received` is on the clock of `time.monotonic`.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Any],
        on_message: Callable[[Link, Any, memoryview | None], None],
        on_closed: Callable[[Link, Exception | None], None],
        allocate: Allocate | None = None,
        on_drained: Callable[[Link], None] | None = None,
    ) -> None:
        sock.setblocking(False)
        self.peer: Any = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.pending_bytes = 0
        self.last_received = time.monotonic()
        self.closed = False
        self._loop = loop
        self._sock = sock
        self._reader = FrameReader(decoder, allocate)
        self._on_message = on_message
        self._on_closed = on_closed
        self._on_drained = on_drained
        self._queue: deque[memoryview] = deque()
        self._waits_to_write = False
        loop.register(sock, selectors.EVENT_READ, self._ready)

    def send(self, message: Any, payload: Sequence[Any] = ()) -> None:
        """Send a message and, behind it, the bytes of `payload`. On a closed link, nothing."""
        if self.closed:
            return
        views = [view for part in payload if (view := memoryview(part).cast("B")).nbytes]
        head = encode_head(_encode(message), sum(view.nbytes for view in views))
        self._queue.append(memoryview(head))
        self._queue.extend(views)
        self.pending_bytes += len(head) + sum(view.nbytes for view in views)
        if not self._waits_to_write:
            self._write()

    def close(self, error: Exception | None = None) -> None:
        """End the link; what is still queued is dropped."""
        if self.closed:
            return
        self.closed = True
        self._queue.clear()
        self.pending_bytes = 0
        self._loop.unregister(self._sock)
        self._sock.close()
        self._on_closed(self, error)

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            try:
                self._read()
            except Exception as error:
                self.close(error)

    def _read(self) -> None:
        turn_bytes = 0
        while turn_bytes < TURN_BYTES and not self.closed:
            buffer = self._reader.buffer()
            try:
                count = self._sock.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(error)
                return
            if count == 0:
                self._reader.close()
                self.close()
                return
            turn_bytes += count
            self.bytes_in += count
            self.last_received = time.monotonic()
            for message, payload in self._reader.received(count):
                if self.closed:
                    return
                self._on_message(self, message, payload)
            if count < len(buffer):
                return

    def _write(self) -> None:
        while self._queue:
            try:
                count = self._sock.sendmsg([self._queue[i] for i in range(min(len(self._queue), MAX_BUFFERS))])
            except BlockingIOError:
                break
            except OSError as error:
                self.close(error)
                return
            self.bytes_out += count
            self.pending_bytes -= count
            while count:
                first = self._queue.popleft()
                if count < first.nbytes:
                    self._queue.appendleft(first[count:])
                    break
                count -= first.nbytes
        waits = bool(self._queue)
        if waits != self._waits_to_write:
            self._waits_to_write = waits
            self._loop.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0), self._ready)
        if not waits and self._on_drained is not None:
            self._on_drained(self)
