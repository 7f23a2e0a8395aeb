"""Frames, links, the token, and the event loop, against broken and hostile peers."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import wire
from paceline.errors import AddressError, AuthError, FrameError
from paceline.wire import FrameReader, Link, encode_head

TOKEN = b"t" * 32


class Ping(msgspec.Struct, tag=True):
    number: int
    text: str = ""


class Pong(msgspec.Struct, tag=True):
    number: int


DECODER = msgspec.msgpack.Decoder(Ping | Pong)
encode = msgspec.msgpack.encode


def stream(*frames: tuple[Any, bytes]) -> bytes:
    return b"".join(encode_head(encode(message), len(payload)) + payload for message, payload in frames)


def feed(reader: FrameReader, data: bytes, cuts: list[int] | None = None) -> list[tuple[Any, bytes]]:
    """Push bytes through a reader, in chunks of the sizes in `cuts` and then the rest."""
    got, sizes = [], list(cuts or [])
    while data:
        room = reader.buffer()
        assert len(room) > 0
        count = min(len(room), len(data), sizes.pop(0) if sizes else len(data))
        room[:count] = data[:count]
        data = data[count:]
        got += [(message, bytes(payload or b"")) for message, payload in reader.received(count)]
    return got


frames = st.lists(
    st.tuples(st.builds(Ping, st.integers(-(2**40), 2**40), st.text(max_size=20)), st.binary(max_size=200)), max_size=8
)


@given(frames, st.lists(st.integers(1, 70), max_size=60))
def test_frames_survive_any_cut(sent: list[tuple[Ping, bytes]], cuts: list[int]) -> None:
    assert feed(FrameReader(DECODER), stream(*sent), cuts) == sent


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 3_000_000])
@pytest.mark.parametrize("cut", [1000, 65536, 10**9])
def test_large_payloads_and_metadata(size: int, cut: int) -> None:
    sent = [(Ping(1, "x" * size), b""), (Ping(2), os.urandom(size)), (Ping(3), b"tail")]
    assert feed(FrameReader(DECODER), stream(*sent), [cut] * (3 * size // cut + 3)) == sent


@given(st.data())
@settings(max_examples=200)
def test_a_flipped_bit_in_the_head_is_a_frame_error(data: st.DataObject) -> None:
    raw = bytearray(stream((Ping(7, "hello"), b"payload")))
    head = len(raw) - len(b"payload")
    raw[data.draw(st.integers(0, head - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FrameError):
        feed(FrameReader(DECODER, max_meta_bytes=1000, max_payload_bytes=1000), bytes(raw) + bytes(5000))


@given(st.binary(min_size=24, max_size=300))
def test_garbage_is_a_frame_error(raw: bytes) -> None:
    with pytest.raises(FrameError):
        feed(FrameReader(DECODER), raw)


def test_oversize_truncated_unknown_and_unwanted_frames() -> None:
    with pytest.raises(FrameError, match="oversize"):
        feed(FrameReader(DECODER, max_meta_bytes=10), stream((Ping(1, "x" * 50), b"")))
    with pytest.raises(FrameError, match="oversize"):
        feed(FrameReader(DECODER, max_payload_bytes=10), stream((Ping(1), bytes(11))))
    with pytest.raises(FrameError, match="oversize"):
        feed(FrameReader(DECODER), encode_head(encode(Ping(1)), 2**60))
    for cut in (3, 30, -1):
        reader = FrameReader(DECODER)
        feed(reader, stream((Ping(1, "abcdef"), bytes(9)))[:cut])
        with pytest.raises(FrameError, match="truncated"):
            reader.close()
    for meta in (encode({"type": "Bomb"}), encode({"type": "Ping", "number": "x"}), b"\xc1", b""):
        with pytest.raises(FrameError, match="unknown or invalid"):
            feed(FrameReader(DECODER), encode_head(meta, 0))
    with pytest.raises(FrameError, match="where 3 were expected"):
        feed(FrameReader(DECODER, allocate=lambda m, n: memoryview(bytearray(3))), stream((Ping(1), bytes(9))))
    with pytest.raises(FrameError, match="frame version 9"):
        feed(FrameReader(DECODER), struct.pack("<4sB3xIQI", b"PCLN", 9, 0, 0, 0))


class Echo:
    """A server in a thread that answers each Ping with a Pong and the same payload."""

    def __init__(self, address: str) -> None:
        self.loop = wire.Loop()
        listener, self.address = wire.bind(address)
        self.closed: list[Exception | None] = []
        self.links: list[Link] = []
        self.loop.listen(listener, TOKEN, self._accept)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def _accept(self, sock: socket.socket) -> None:
        self.links.append(self.loop.attach(sock, DECODER, self._answer, lambda _, error: self.closed.append(error)))

    def _answer(self, link: Link, message: Any, payload: memoryview | None) -> None:
        link.send(Pong(message.number), [payload] if payload is not None else [])

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()


@pytest.fixture(params=["unix", "tcp"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    server = Echo(f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0")
    yield server
    server.stop()


def talk(address: str, sent: list[tuple[Any, list[bytes]]], token: bytes = TOKEN) -> list[tuple[Any, bytes]]:
    """Send frames and collect as many answers."""
    loop, got = wire.Loop(), []

    def on_message(link: Link, message: Any, payload: memoryview | None) -> None:
        got.append((message, bytes(payload or b"")))
        if len(got) == len(sent):
            loop.stop()

    link = loop.attach(wire.connect(address, token, 5), DECODER, on_message, lambda *_: loop.stop())
    for message, payload in sent:
        link.send(message, payload)
    loop.run()
    return got


def test_frames_come_back_in_order(echo: Echo) -> None:
    big = os.urandom(20_000_000)
    sent: list[tuple[Any, list[bytes]]] = [(Ping(i), [b"ab", b"", b"c"]) for i in range(3000)]
    sent.append((Ping(3000), [big[:7], big[7:]]))
    got = talk(echo.address, sent)
    assert [message.number for message, _ in got] == list(range(3001))
    assert got[5][1] == b"abc"
    assert got[-1][1] == big


def test_a_wrong_token_is_refused_and_others_go_on(echo: Echo) -> None:
    with pytest.raises(AuthError):
        wire.connect(echo.address, b"wrong", 5)
    assert talk(echo.address, [(Ping(1), [])])[0][0] == Pong(1)
    assert len(echo.loop.refused) == 1


def raw(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(rest)
        return sock
    return socket.create_connection(("127.0.0.1", int(rest.rpartition(":")[2])))


def test_a_silent_or_babbling_peer_is_dropped_unread(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wire.loop.AUTH_TIMEOUT_S", 0.3)
    silent, babbling = raw(echo.address), raw(echo.address)
    babbling.sendall(os.urandom(100_000)[:1000])
    assert talk(echo.address, [(Ping(1), [])])[0][0] == Pong(1)
    for sock in (silent, babbling):
        sock.settimeout(5)
        data = b"x"
        while data:
            try:
                data = sock.recv(1000)
            except ConnectionResetError:
                break
        sock.close()
    assert not [link for link in echo.links if link.closed is False and link.bytes_in > 200]


def broken(echo: Echo) -> int:
    return sum(isinstance(error, FrameError) for error in echo.closed)


def test_a_broken_frame_ends_that_link_only(echo: Echo) -> None:
    for bad in (
        b"x" * 100,
        stream((Ping(1), b""))[:-1] + b"\0",
        encode_head(encode(Ping(1)), 2**50),
        stream((Ping(1), b"xy"))[:-1],
    ):
        before = broken(echo)
        sock = wire.connect(echo.address, TOKEN, 5)
        sock.sendall(bad)
        if bad.startswith(b"PCLN"):
            sock.shutdown(socket.SHUT_WR)
        deadline_s = time.monotonic() + 5
        while broken(echo) == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert broken(echo) == before + 1
        sock.close()
        assert talk(echo.address, [(Ping(2), [])])[0][0] == Pong(2)


def test_bind_and_connect_errors_name_the_cause(tmp_path: Path) -> None:
    listener, address = wire.bind("tcp:127.0.0.1:0")
    with listener, pytest.raises(AddressError, match="EADDRINUSE"):
        wire.bind(address)
    with pytest.raises(AddressError, match="EADDRNOTAVAIL"):
        wire.bind("tcp:192.0.2.1:0")
    with pytest.raises(AddressError, match="107"):
        wire.bind(f"unix:/{'x' * 200}")
    for wrong in ("tcp:localhost", "udp:1:2", "tcp:127.0.0.1:70000", "unix:"):
        with pytest.raises(AddressError, match="write it as"):
            wire.bind(wrong)
    for retry_s in (0.0, 0.2):
        began_s = time.monotonic()
        with pytest.raises(AddressError, match="ENOENT"):
            wire.connect(f"unix:{tmp_path}/nobody", TOKEN, 30, retry_s)
        assert retry_s <= time.monotonic() - began_s < retry_s + 3


def test_a_server_that_does_not_answer_is_an_error_in_time(tmp_path: Path) -> None:
    listener, address = wire.bind(f"unix:{tmp_path}/mute")
    with listener, pytest.raises(AuthError):
        wire.connect(address, TOKEN, 0.3)


def test_calls_from_threads_and_timers_run_on_the_loop() -> None:
    loop, seen = wire.Loop(), []
    loop.call_every(0.01, lambda: seen.append("tick"))
    loop.call_after(0.02, lambda: seen.append("once"))
    thread = threading.Thread(target=loop.run)
    thread.start()
    for i in range(100):
        loop.call_soon(seen.append, i)
    time.sleep(0.2)
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert [item for item in seen if isinstance(item, int)] == list(range(100))
    assert seen.count("once") == 1
    assert seen.count("tick") > 3


def test_stopping_sends_what_is_queued(tmp_path: Path) -> None:
    server = Echo(f"unix:{tmp_path}/s")
    loop = wire.Loop()
    drained: list[Link] = []
    closed: Callable[..., None] = lambda *_: None  # noqa: E731
    link = loop.attach(wire.connect(server.address, TOKEN, 5), DECODER, closed, closed, on_drained=drained.append)
    link.send(Ping(1), [bytes(30_000_000)])
    assert link.pending_bytes > 0
    loop.stop()
    loop.run()
    assert drained
    deadline_s = time.monotonic() + 5
    while server.links[0].bytes_in < 30_000_000 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert server.links[0].bytes_in >= 30_000_000
    server.stop()
