"""A newcomer: a connection that must prove the job token within a time before it may become a link."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.errors import AuthError
from paceline.wire.address import peer_name
from paceline.wire.auth import ServerSide

if TYPE_CHECKING:
    from paceline.wire.loop import Loop


class Newcomer:
    """A connection that has not proved the token yet."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        token: bytes,
        on_peer: Callable[[socket.socket], object],
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._side = ServerSide(token, peer_name(sock))
        self._on_peer = on_peer
        self._settled = False
        sock.setblocking(False)
        loop.register(sock, selectors.EVENT_READ, self._ready)
        loop.call_after(timeout_s, self._drop)
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
        try:
            self._on_peer(self._sock)
        except Exception as error:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._loop.on_error(error, None)

    def _drop(self) -> None:
        if not self._settled:
            self._settled = True
            self._loop.unregister(self._sock)
            self._sock.close()
