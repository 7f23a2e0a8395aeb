"""A link: one authenticated socket in an event loop, sending and receiving frames."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.wire.frames import Allocate, FrameReader, encode_head

if TYPE_CHECKING:
    from paceline.wire.loop import Loop

TURN_BYTES = 4 << 20
"""What one link may read, and what it may write, before the others get their turn."""

MAX_BUFFERS = 512
"""Buffers handed to the kernel at once."""

_encode = msgspec.msgpack.Encoder().encode


class Link:
    """All methods belong to the loop's thread. What is sent stays referenced, and must not change, until it is out.

    An exception in a handler ends the link with it. When the peer takes no more, what it sent before that is still
    given out, and then the link ends with the error of the failed send.

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
        self._failure: OSError | None = None
        loop.register(sock, selectors.EVENT_READ, self._ready)

    def send(self, message: Any, payload: Sequence[Any] = ()) -> None:
        """Send a message and, behind it, the bytes of `payload`. On a closed link, nothing."""
        if self.closed or self._failure is not None:
            return
        views = [view.cast("B") for part in payload if (view := memoryview(part)).nbytes]
        payload_bytes = sum([view.nbytes for view in views])
        head = encode_head(_encode(message), payload_bytes)
        self._queue.append(memoryview(head))
        self._queue.extend(views)
        self.pending_bytes += len(head) + payload_bytes
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
        try:
            self._on_closed(self, error)
        except Exception as raised:
            self._loop.on_error(raised, None)

    def abandon(self) -> None:
        """Of a loop that has ended: what is sent from now on goes nowhere."""
        self.closed = True
        self._queue.clear()
        self.pending_bytes = 0

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write()
        if mask & selectors.EVENT_READ and not self.closed:
            self._read()
        if self._failure is not None and not self.closed:
            self._loop.call_soon(self._ready, selectors.EVENT_READ)

    def _read(self) -> None:
        turn_bytes = 0
        while turn_bytes < TURN_BYTES and not self.closed:
            try:
                buffer = self._reader.buffer()
                count = self._sock.recv_into(buffer)
                if count == 0:
                    self._reader.close()
                frames = self._reader.received(count)
            except BlockingIOError:
                if self._failure is not None:
                    self.close(self._failure)
                return
            except Exception as error:
                self.close(error)
                return
            if count == 0:
                self.close(self._failure)
                return
            turn_bytes += count
            self.bytes_in += count
            self.last_received = time.monotonic()
            for message, payload in frames:
                if self.closed:
                    return
                try:
                    self._on_message(self, message, payload)
                except Exception as error:
                    self._end(error)
            if count < len(buffer) and self._failure is None:
                return

    def _write(self) -> None:
        turn_bytes = 0
        while self._queue and turn_bytes < TURN_BYTES:
            try:
                count = self._sock.sendmsg(self._batch())
            except BlockingIOError:
                break
            except OSError as error:
                self._fail(error)
                return
            turn_bytes += count
            self.bytes_out += count
            self.pending_bytes -= count
            if self.pending_bytes:
                self._take_off(count)
            else:
                self._queue.clear()
        self._wait_to_write(bool(self._queue))
        if not self._queue and self._on_drained is not None:
            try:
                self._on_drained(self)
            except Exception as error:
                self._end(error)

    def _batch(self) -> Iterable[memoryview]:
        """The head of the queue, as much as one turn may send."""
        if self.pending_bytes <= TURN_BYTES and len(self._queue) <= MAX_BUFFERS:
            return self._queue
        batch, room = [], TURN_BYTES
        for view in islice(self._queue, MAX_BUFFERS):
            batch.append(view[:room])
            room -= view.nbytes
            if room <= 0:
                break
        return batch

    def _take_off(self, count: int) -> None:
        while count:
            first = self._queue.popleft()
            if count < first.nbytes:
                self._queue.appendleft(first[count:])
                return
            count -= first.nbytes

    def _wait_to_write(self, waits: bool) -> None:
        if waits != self._waits_to_write:
            self._waits_to_write = waits
            self._loop.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if waits else 0), self._ready)

    def _fail(self, error: OSError) -> None:
        """The peer takes no more: read what it said before, then close."""
        self._failure = error
        self._queue.clear()
        self.pending_bytes = 0
        self._wait_to_write(False)
        self._loop.call_soon(self._ready, selectors.EVENT_READ)

    def _end(self, error: Exception) -> None:
        """A handler of this link raised."""
        self._loop.on_error(error, self)
        self.close(error)
