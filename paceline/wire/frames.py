"""Frames without I/O: a fixed header, typed metadata, raw bytes.

Header, little-endian, 24 bytes: magic "PCLN", version (1 byte), three zero bytes, metadata length (4), payload length
(8), CRC-32 of the header before it and the metadata (4). The payload's integrity is left to the transport.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import FrameError

HEADER = struct.Struct("<4sB3xIQI")
MAGIC = b"PCLN"
VERSION = 1
SCRATCH_BYTES = 65536
MAX_META_BYTES = 64_000_000
MAX_PAYLOAD_BYTES = 1 << 40

Frame = tuple[Any, memoryview | None]
Allocate = Callable[[Any, int], memoryview]


def encode_head(meta: bytes, payload_bytes: int) -> bytes:
    """Header and metadata of a frame, after which `payload_bytes` bytes follow.

    >>> len(encode_head(b"xyz", 10))
    27
    """
    start = HEADER.pack(MAGIC, VERSION, len(meta), payload_bytes, 0)[:-4]
    return start + zlib.crc32(meta, zlib.crc32(start)).to_bytes(4, "little") + meta


class FrameReader:
    """Turns a stream of bytes into frames. The driver reads into `buffer()` and reports with `received(n)`; a large
    payload is so read straight into the memory that `allocate(message, payload_bytes)` gave for it.

    Raises FrameError for anything that is not a whole, intact, known frame of allowed size.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        allocate: Allocate | None = None,
        max_meta_bytes: int = MAX_META_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._decode = decoder.decode
        self._allocate = allocate or (lambda _, nbytes: memoryview(bytearray(nbytes)))
        self._max_meta_bytes = max_meta_bytes
        self._max_payload_bytes = max_payload_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0
        self._message: Any = None
        self._payload: memoryview | None = None
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong; never empty."""
        if self._payload is not None and self._start == self._end:
            return self._payload[self._filled :]
        if self._start and self._end == len(self._scratch):
            self._make_room(len(self._scratch))
        return self._scratch[self._end :]

    def received(self, count: int) -> list[Frame]:
        """`count` bytes were written to `buffer()`: the frames that are now complete."""
        frames: list[Frame] = []
        if self._payload is not None and self._start == self._end:
            self._filled += count
            self._finish(frames)
            return frames
        self._end += count
        while self._end > self._start and self._parse(frames):
            pass
        if self._start == self._end:
            self._start = self._end = 0
        return frames

    def close(self) -> None:
        """The stream has ended. Raises FrameError in the middle of a frame."""
        if self._payload is not None or self._start != self._end:
            raise FrameError("truncated frame: the stream ended in the middle")

    def _parse(self, frames: list[Frame]) -> bool:
        """Take one step forward in the scratch memory; False when more bytes are needed."""
        have = self._end - self._start
        if self._payload is not None:
            count = min(have, len(self._payload) - self._filled)
            self._payload[self._filled : self._filled + count] = self._scratch[self._start : self._start + count]
            self._start += count
            self._filled += count
            return self._finish(frames)
        if have < HEADER.size:
            return False
        magic, version, meta_bytes, payload_bytes, crc = HEADER.unpack_from(self._scratch, self._start)
        if magic != MAGIC:
            raise FrameError(f"no frame: it begins with {bytes(magic)!r}", "the peer is no paceline process")
        if version != VERSION:
            raise FrameError(
                f"frame version {version}", f"this process speaks version {VERSION}: use one release everywhere"
            )
        if meta_bytes > self._max_meta_bytes:
            raise FrameError(
                f"oversize frame: {meta_bytes} bytes of metadata, at most {self._max_meta_bytes} are allowed"
            )
        if payload_bytes > self._max_payload_bytes:
            raise FrameError(
                f"oversize frame: {payload_bytes} bytes of payload, at most {self._max_payload_bytes} are allowed"
            )
        whole = HEADER.size + meta_bytes
        if have < whole:
            self._make_room(whole)
            return False
        head = self._scratch[self._start : self._start + whole]
        meta = head[HEADER.size :]
        if zlib.crc32(meta, zlib.crc32(head[: HEADER.size - 4])) != crc:
            raise FrameError("corrupt frame: the checksum of its header and metadata is wrong")
        try:
            self._message = self._decode(meta)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FrameError(f"unknown or invalid message: {error}") from None
        self._start += whole
        if payload_bytes == 0:
            frames.append((self._message, None))
            return True
        try:
            payload = self._allocate(self._message, payload_bytes)
        except FrameError:
            raise
        except Exception as error:
            raise FrameError(f"no room for a payload of {payload_bytes} bytes: {error!r}") from error
        if payload.nbytes != payload_bytes:
            raise FrameError(f"a payload of {payload_bytes} bytes where {payload.nbytes} were expected")
        self._payload = payload.cast("B")
        self._filled = 0
        return True

    def _finish(self, frames: list[Frame]) -> bool:
        """Give out the frame whose payload is complete."""
        if self._payload is None or self._filled < len(self._payload):
            return False
        frames.append((self._message, self._payload))
        self._message = self._payload = None
        return True

    def _make_room(self, size: int) -> None:
        """Move what is unread to the front of scratch memory of at least `size` bytes."""
        unread = bytes(self._scratch[self._start : self._end])
        if size > len(self._scratch):
            self._scratch = memoryview(bytearray(size))
        self._scratch[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
