"""Addresses: `unix:/path` and `tcp:host:port`; binding and connecting with errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from paceline.errors import AddressError
from paceline.wire.auth import prove

MAX_UNIX_PATH_BYTES = 107
BUFFER_BYTES = 4 << 20

FIXES = {
    "EADDRINUSE": "another process listens there: choose another port, or port 0 for a free one",
    "EACCES": "ports below 1024 and folders of others need rights: choose another",
    "EADDRNOTAVAIL": "this host has no such address: see `ip addr`, or use 127.0.0.1",
    "ENOENT": "the folder of the socket does not exist",
}


def parse(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """The family and the socket address. Raises AddressError.

    >>> parse("tcp:127.0.0.1:0")[1]
    ('127.0.0.1', 0)
    """
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest:
        if len(rest.encode()) > MAX_UNIX_PATH_BYTES:
            what = f"the socket path has {len(rest.encode())} bytes, at most {MAX_UNIX_PATH_BYTES} are possible: {rest}"
            raise AddressError(what, "use a shorter folder (TMPDIR), or tcp")
        return socket.AF_UNIX, rest
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isdecimal() and int(port) < 65536:
        host = host.strip("[]")
        return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))
    raise AddressError(f"address {address!r}", 'write it as "unix:/path" or "tcp:host:port"')


def bind(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address it has (a port of 0 becomes a real one). Raises AddressError."""
    family, place = parse(address)
    sock = socket.socket(family)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(512)
    except OSError as error:
        sock.close()
        raise _explain(f"cannot listen on {address}", error) from None
    if family == socket.AF_UNIX:
        return sock, address
    host, port = sock.getsockname()[:2]
    return sock, f"tcp:[{host}]:{port}" if family == socket.AF_INET6 else f"tcp:{host}:{port}"


def connect(address: str, token: bytes, timeout_s: float, retry_s: float = 0.0) -> socket.socket:
    """An authenticated connection within `timeout_s`; where nobody listens yet, it is tried again for `retry_s`.

    Raises AddressError or AuthError.
    """
    family, place = parse(address)
    deadline_s, retry_until_s = time.monotonic() + timeout_s, time.monotonic() + retry_s
    while True:
        sock = socket.socket(family)
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            sock.connect(place)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as error:
            sock.close()
            if time.monotonic() >= retry_until_s:
                raise _explain(f"cannot reach {address}", error) from None
            time.sleep(0.05)
        except OSError as error:
            sock.close()
            raise _explain(f"cannot reach {address}", error) from None
        else:
            try:
                tune(sock)
                prove(sock, token, address)
            except BaseException:
                sock.close()
                raise
            return sock


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and let the kernel hold more than one piece."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _explain(what: str, error: OSError) -> AddressError:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return AddressError(f"{what}: {name}, {error.strerror or error}", FIXES.get(name, "is the server running?"))
