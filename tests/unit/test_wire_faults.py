"""Links and the loop when a peer, a handler or the host misbehaves: the fault has a name, and touches nothing else."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline import wire
from paceline.errors import AddressError, AuthError, FrameError
from paceline.wire import FrameReader, Link, Loop, encode_head
from paceline.wire import link as link_module

pytestmark = pytest.mark.timeout(15)
TOKEN = b"t" * 32


class Note(msgspec.Struct, tag=True):
    number: int


class Nested(msgspec.Struct, tag=True):
    items: list[Any]


DECODER = msgspec.msgpack.Decoder(Note | Nested)
encode = msgspec.msgpack.encode


def frame(number: int, payload: bytes = b"") -> bytes:
    return encode_head(encode(Note(number)), len(payload)) + payload


def nothing(*_: object) -> None:
    pass


def read_all(data: bytes, reader: FrameReader) -> list[Any]:
    """The messages in `data`, after which the stream ends."""
    got = []
    while data:
        room = reader.buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        data = data[count:]
        got += [message for message, _ in reader.received(count)]
    reader.close()
    return got


class Box:
    """A loop and what its links reported."""

    def __init__(self, **options: Any) -> None:
        self.loop = Loop(**options)
        self.got: list[int] = []
        self.closed: list[Exception | None] = []

    def attach(self, sock: socket.socket, **handlers: Any) -> Link:
        def collect(_link: Link, message: Any, _payload: object) -> None:
            self.got.append(message.number)

        defaults = {"on_message": collect, "on_closed": lambda _, error: self.closed.append(error)}
        return self.loop.attach(sock, DECODER, **{**defaults, **handlers})

    def run_until(self, done: Callable[[], object], within_s: float = 5.0) -> None:
        deadline_s = time.monotonic() + within_s

        def look() -> None:
            if done() or time.monotonic() > deadline_s:
                self.loop.stop()

        self.loop.call_every(0.005, look)
        self.loop.run()
        assert done()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


PAIRS = pytest.mark.parametrize("pair", [socket.socketpair, tcp_pair], ids=["unix", "tcp"])


# Frames ---------------------------------------------------------------------------------------------------------------


def test_each_changed_byte_of_a_head_is_a_frame_error() -> None:
    good = frame(7, b"payload")
    for at in range(len(good) - len(b"payload")):
        for value in {0, 255, good[at] ^ 1, good[at] ^ 128} - {good[at]}:
            with pytest.raises(FrameError):
                read_all(good[:at] + bytes([value]) + good[at + 1 :], FrameReader(DECODER))


def test_a_stream_that_ends_anywhere_inside_a_frame_is_truncated() -> None:
    good = frame(7, b"payload")
    assert read_all(good, FrameReader(DECODER)) == [Note(7)]
    for cut in range(1, len(good)):
        with pytest.raises(FrameError, match="truncated"):
            read_all(good[:cut], FrameReader(DECODER))


def test_a_message_nested_too_deeply_is_a_frame_error() -> None:
    meta = b"\x82\xa4type\xa6Nested\xa5items" + b"\x91" * 100_000 + b"\x01"
    with pytest.raises(FrameError, match="unknown or invalid"):
        read_all(encode_head(meta, 0), FrameReader(DECODER))


@pytest.mark.parametrize("refusal", [MemoryError("full"), KeyError("piece 3"), ValueError("no")])
def test_a_refused_payload_is_a_frame_error_that_gives_the_reason(refusal: Exception) -> None:
    def refuse(_message: Any, _nbytes: int) -> memoryview:
        raise refusal

    with pytest.raises(FrameError, match=f"no room for a payload of 9 bytes: {type(refusal).__name__}"):
        read_all(frame(1, bytes(9)), FrameReader(DECODER, refuse))


def test_a_payload_may_be_received_into_memory_of_any_item_type() -> None:
    room = np.zeros(3, np.float32)
    reader = FrameReader(DECODER, lambda _, nbytes: memoryview(room))
    assert read_all(frame(1, np.array([1, 2, 3], np.float32).tobytes()), reader) == [Note(1)]
    assert room.tolist() == [1, 2, 3]


# Links ----------------------------------------------------------------------------------------------------------------


@PAIRS
def test_50_mb_arrive_intact_in_the_memory_given_for_them(pair: Callable[[], tuple[socket.socket, ...]]) -> None:
    here, there = pair()
    sent, room = np.arange(12_500_000, dtype=np.int32), bytearray(50_000_000)
    box = Box()
    box.attach(there, allocate=lambda _, nbytes: memoryview(room)[:nbytes])
    box.attach(here).send(Note(1), [sent])
    box.run_until(lambda: box.got)
    assert np.array_equal(np.frombuffer(room, np.int32), sent)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_is_an_empty_payload(shape: tuple[int, ...]) -> None:
    here, there = socket.socketpair()
    box = Box()
    box.attach(there)
    box.attach(here).send(Note(1), [np.zeros(shape, np.float32)])
    box.run_until(lambda: box.got == [1])


@PAIRS
def test_the_last_words_of_a_peer_that_is_gone_are_heard(pair: Callable[[], tuple[socket.socket, ...]]) -> None:
    here, there = pair()
    box = Box()
    link = box.attach(here)
    there.sendall(frame(99))
    there.close()
    time.sleep(0.05)
    for number in range(3):
        link.send(Note(number))
        time.sleep(0.02)
    box.run_until(lambda: box.closed)
    assert box.got == [99]
    assert isinstance(box.closed[0], OSError)


def test_a_link_closed_in_mid_send_drops_its_queue_and_reports_once() -> None:
    here, there = socket.socketpair()
    box = Box()
    link = box.attach(here)
    link.send(Note(1), [bytes(30_000_000)])
    assert link.pending_bytes > 0
    link.close()
    link.close()
    link.send(Note(2))
    assert (link.pending_bytes, box.closed) == (0, [None])
    there.close()


@pytest.mark.parametrize("where", ["on_message", "on_drained"])
def test_an_exception_in_a_handler_ends_its_link_only(where: str) -> None:
    def boom(*_: object) -> None:
        raise ValueError("boom")

    bad_here, bad_there = socket.socketpair()
    good_here, good_there = socket.socketpair()
    heard: list[tuple[str, bool]] = []
    box = Box(on_error=lambda error, link: heard.append((str(error), link is bad)))
    bad = box.attach(bad_here, **{where: boom})
    box.attach(good_here)
    bad_there.sendall(frame(1))
    box.loop.call_soon(bad.send, Note(2))
    box.loop.call_after(0.05, lambda: good_there.sendall(frame(3)))
    box.run_until(lambda: box.closed and 3 in box.got)
    assert [str(error) for error in box.closed] == ["boom"]
    assert heard == [("boom", True)]


@pytest.mark.parametrize("where", ["call", "timer", "on_closed"])
def test_an_exception_that_no_link_can_be_blamed_for_ends_the_loop_unless_caught(where: str) -> None:
    def boom(*_: object) -> None:
        raise ValueError("boom")

    def prepare(box: Box) -> None:
        if where == "call":
            box.loop.call_soon(boom)
        elif where == "timer":
            box.loop.call_after(0.01, boom)
        else:
            box.attach(socket.socketpair()[0], on_closed=boom)  # whose peer is gone

    box = Box()
    prepare(box)
    with pytest.raises(ValueError, match="boom"):
        box.loop.run()
    heard: list[str] = []
    box = Box(on_error=lambda error, link: heard.append(f"{error} {link}"))
    prepare(box)
    box.run_until(lambda: heard == ["boom None"])


def test_an_error_flagged_fatal_comes_out_of_run() -> None:
    def fatal(error: Exception, _link: Link | None) -> None:
        raise error

    def boom(*_: object) -> None:
        raise ValueError("boom")

    here, there = socket.socketpair()
    box = Box(on_error=fatal)
    box.attach(here, on_message=boom)
    there.sendall(frame(1))
    with pytest.raises(ValueError, match="boom"):
        box.loop.run()


def test_a_link_writes_a_bounded_amount_before_the_others_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy:
        """A socket whose peer takes everything at once, and an account of what it was given."""

        def __init__(self, sock: socket.socket) -> None:
            self.given: list[int] = []
            self._sock = sock

        def sendmsg(self, views: Any) -> int:
            self.given.append(sum(view.nbytes for view in views))
            return self.given[-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

    monkeypatch.setattr(link_module, "TURN_BYTES", 1000)
    here, _there = socket.socketpair()
    box = Box()
    link = box.attach(here)
    greedy = Greedy(here)
    monkeypatch.setattr(link, "_sock", greedy)
    link.send(Note(1), [bytes(2500)])
    assert greedy.given == [1000]
    link._write()
    assert greedy.given == [1000, 1000]
    link._write()
    link._write()
    assert sum(greedy.given) == link.bytes_out == len(frame(1)) + 2500
    assert link.pending_bytes == 0


def test_a_huge_payload_does_not_hold_up_another_link() -> None:
    big_here, big_there = socket.socketpair()
    small_here, small_there = socket.socketpair()
    box = Box()
    receivers = [box.attach(big_there), box.attach(small_there)]
    box.attach(big_here).send(Note(1), [bytes(50_000_000)])
    box.attach(small_here).send(Note(2))
    box.run_until(lambda: len(box.got) == 2)
    assert box.got == [2, 1]
    assert receivers[0].bytes_in > 50_000_000


def test_thousands_of_queued_frames_arrive_in_order() -> None:
    here, there = socket.socketpair()
    box = Box()
    box.attach(there)
    link = box.attach(here)
    for number in range(20_000):
        link.send(Note(number), [b"x", b"yz"])
    assert link.pending_bytes > 0
    box.run_until(lambda: len(box.got) == 20_000)
    assert box.got == list(range(20_000))


def test_after_the_loop_has_ended_sending_does_nothing() -> None:
    here, there = socket.socketpair()
    box = Box()
    link = box.attach(here)
    box.loop.stop()
    box.loop.run()
    link.send(Note(1))
    link.close()
    assert there.recv(10) == b""
    assert box.closed == []


def test_stopping_does_not_wait_for_a_peer_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wire.loop.DRAIN_S", 0.2)
    here, there = socket.socketpair()
    box = Box()
    box.attach(here).send(Note(1), [bytes(30_000_000)])
    box.loop.stop()
    began_s = time.monotonic()
    box.loop.run()
    assert time.monotonic() - began_s < 2
    there.close()


def test_calls_of_many_threads_are_made_in_each_threads_order() -> None:
    loop, seen = Loop(), []
    threads = [
        threading.Thread(target=lambda n=n: [loop.call_soon(seen.append, (n, i)) for i in range(500)]) for n in range(4)
    ]
    runner = threading.Thread(target=loop.run)
    for thread in [runner, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    loop.stop()
    runner.join(5)
    assert not runner.is_alive()
    for n in range(4):
        assert [i for m, i in seen if m == n] == list(range(500))


def test_waiting_counts_as_idle_and_working_does_not() -> None:
    loop = Loop()
    loop.call_soon(time.sleep, 0.2)
    loop.call_after(0.5, loop.stop)
    loop.run()
    assert 0.2 < loop.idle_s < 0.45


# Newcomers and addresses ----------------------------------------------------------------------------------------------


def serve(box: Box, address: str) -> tuple[str, threading.Thread]:
    listener, actual = wire.bind(address)
    box.loop.listen(listener, TOKEN, box.attach)
    thread = threading.Thread(target=box.loop.run, daemon=True)
    thread.start()
    return actual, thread


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_refused_peer_is_named(kind: str, tmp_path: Path) -> None:
    box = Box()
    address, thread = serve(box, f"unix:{tmp_path}/s" if kind == "unix" else "tcp:127.0.0.1:0")
    with pytest.raises(AuthError, match="it closed the link") as refusal:
        wire.connect(address, b"wrong", 5)
    assert address in str(refusal.value)
    box.loop.stop()
    thread.join(5)
    assert (f"process {os.getpid()} " if kind == "unix" else "127.0.0.1 port ") in str(box.loop.refused[0])


def test_an_exception_in_on_peer_disturbs_no_other_peer() -> None:
    box, errors = Box(), []
    box.loop.on_error = lambda error, link: errors.append((str(error), link))
    listener, address = wire.bind("tcp:127.0.0.1:0")

    def accept(sock: socket.socket) -> None:
        if not errors:
            raise ValueError("boom")
        box.attach(sock)

    box.loop.listen(listener, TOKEN, accept)
    thread = threading.Thread(target=box.loop.run, daemon=True)
    thread.start()
    first = wire.connect(address, TOKEN, 5)
    assert first.recv(1) == b""
    wire.connect(address, TOKEN, 5).sendall(frame(5))
    deadline_s = time.monotonic() + 5
    while not box.got and time.monotonic() < deadline_s:
        time.sleep(0.01)
    box.loop.stop()
    thread.join(5)
    assert (box.got, errors) == ([5], [("boom", None)])


def test_a_host_out_of_file_descriptors_is_waited_for() -> None:
    class Exhausted(socket.socket):
        tries = 0

        def accept(self) -> Any:
            self.tries += 1
            if self.tries == 1:
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    listener = Exhausted(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    box = Box()
    box.loop.listen(listener, TOKEN, box.attach)
    thread = threading.Thread(target=box.loop.run, daemon=True)
    thread.start()
    wire.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", TOKEN, 5).close()
    box.loop.stop()
    thread.join(5)
    assert listener.tries == 2


def test_a_server_that_answers_drop_by_drop_does_not_stretch_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock:
                for byte in b"paceline/1\n" + bytes(32):
                    time.sleep(0.1)
                    try:
                        sock.send(bytes([byte]))
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        began_s = time.monotonic()
        with pytest.raises(AuthError, match="timed out"):
            wire.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", TOKEN, 0.4)
        assert time.monotonic() - began_s < 1.5
        thread.join(10)


def test_a_full_backlog_is_waited_for(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/s")
    listener.listen(0)
    first = socket.socket(socket.AF_UNIX)
    first.connect(f"{tmp_path}/s")
    box = Box()
    thread = threading.Thread(target=box.loop.run, daemon=True)
    box.loop.call_after(0.3, lambda: box.loop.listen(listener, TOKEN, box.attach))
    thread.start()
    wire.connect(f"unix:{tmp_path}/s", TOKEN, 5).close()
    box.loop.stop()
    thread.join(5)
    first.close()


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("unix:/no/such/folder/s", "ENOENT"),
        ("unix:/tmp/a\0b", "null byte"),
        ("tcp:no host.invalid:0", "gaierror"),
        (f"unix:/{'x' * 107}", "108 bytes"),
    ],
)
def test_addresses_that_cannot_be_bound_say_why(address: str, cause: str) -> None:
    with pytest.raises(AddressError, match=cause) as error:
        wire.bind(address)
    assert error.value.fix


def test_a_forbidden_address_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "socket", Forbidden)
    with pytest.raises(AddressError, match=r"cannot listen on tcp:127.0.0.1:80: EACCES.*below 1024"):
        wire.bind("tcp:127.0.0.1:80")
