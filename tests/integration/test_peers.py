"""Peers of a live server that are not what they say, or come twice: they are refused, and the run goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from paceline import wire
from paceline.engines.server import Server
from paceline.errors import FrameError
from paceline.exchange import messages as m
from paceline.job import Job
from paceline.train.client import DECODER
from paceline.watch.events import EventLog
from paceline.wire import Link

TOKEN = b"secret"


def serve(tmp_path: Path) -> tuple[Server, str, threading.Thread, list[BaseException]]:
    listener, address = wire.bind(f"unix:{tmp_path}/s")
    server = Server(0, Job(workers=2, lease_s=8.0), listener, TOKEN, EventLog(tmp_path / "e"), lambda: None)
    errors: list[BaseException] = []

    def body() -> None:
        try:
            server.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return server, address, thread, errors


def talk(address: str, sent: list[Any], for_s: float = 0.5) -> tuple[list[Any], list[Exception | None]]:
    """Send messages, and collect answers and the link's end for a while."""
    loop, got, ended = wire.Loop(), [], []

    def closed(_link: Link, error: Exception | None) -> None:
        ended.append(error)
        loop.stop()

    link = loop.attach(
        wire.connect(address, TOKEN, 5), DECODER, lambda _link, message, _payload: got.append(message), closed
    )
    for message in sent:
        link.send(message, [torch.zeros(3).numpy()] if isinstance(message, m.Push) else [])
    loop.call_after(for_s, loop.stop)
    loop.run()
    return got, ended


def test_strange_peers_are_refused_and_the_run_ends_by_its_own_time(tmp_path: Path) -> None:
    _server, address, thread, errors = serve(tmp_path)
    _, ended = talk(address, [m.Beat()])
    assert len(ended) == 1, "a message before Hello ends the link"
    _, ended = talk(address, [m.Hello("worker", 7), m.Push(0, 10**6)])
    assert len(ended) == 1, "a worker that the job does not have is refused"
    got, _ = talk(address, [m.Hello("server", 0, 0)])
    assert "server 0 is already here" in got[0].what
    held, result = threading.Event(), []

    def first() -> None:
        result.append(talk(address, [m.Hello("worker", 0, 1), m.Beat()], 2.0))
        held.set()

    threading.Thread(target=first, daemon=True).start()
    time.sleep(0.5)
    for incarnation in (0, 1):
        got, _ = talk(address, [m.Hello("worker", 0, incarnation)])
        assert [type(message) for message in got] == [m.Abort]
        assert "already here, as incarnation 1" in got[0].what
    assert held.wait(20)
    got, ended = result[0]
    assert m.Beat() in got
    assert not any(isinstance(error, FrameError) for error in ended)
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1
