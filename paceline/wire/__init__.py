"""How bytes move: frames, links over Unix sockets and TCP, one event loop a process. Nothing is pickled."""

from paceline.wire.address import bind, connect
from paceline.wire.frames import FrameReader, encode_head
from paceline.wire.link import Link
from paceline.wire.loop import Loop

__all__ = ["FrameReader", "Link", "Loop", "bind", "connect", "encode_head"]
