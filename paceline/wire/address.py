"""Addresses: `unix:/path` and `tcp:host:port`; binding and connecting with errors that say what to do."""

from __future__ import annotations

import errno
import socket
import struct
import time

from paceline.errors import AddressError
from paceline.wire.auth import prove

MAX_UNIX_PATH_BYTES = 107
UNIX_BUFFER_BYTES = 1 << 20

FIXES = {
    "EADDRINUSE": "another process listens there: choose another port, or port 0 for a free one",
    "EACCES": "ports below 1024 and folders of others need rights: choose another",
    "EADDRNOTAVAIL": "this host has no such address: see `ip addr`, or use 127.0.0.1",
    "ENOENT": "the folder of the socket does not exist",
    "gaierror": "no host of that name is known: use an IP address, such as 127.0.0.1",
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
        if "\0" in rest:
            raise AddressError(f"the socket path holds a null byte: {rest!r}", "choose another path")
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
            full = isinstance(error, BlockingIOError)  # somebody listens, and more wait than it has room for
            if time.monotonic() >= (deadline_s if full else retry_until_s):
                raise _explain(f"cannot reach {address}", error) from None
            time.sleep(0.05)
        except OSError as error:
            sock.close()
            raise _explain(f"cannot reach {address}", error) from None
        else:
            try:
                tune(sock)
                prove(sock, token, address, deadline_s)
            except BaseException:
                sock.close()
                raise
            return sock


def tune(sock: socket.socket) -> None:
    """Send small frames at once over TCP, whose buffers the kernel sizes by itself; of a Unix socket, let them hold
    enough to keep both ends busy, and little enough to stay in cache."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_name(sock: socket.socket) -> str:
    """Who is at the other end, for an error: a host and port, or a process of this host."""
    try:
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return f"process {struct.unpack('3i', credentials)[0]} of this host"
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that is gone"
    return f"the peer at {host} port {port}"


def _explain(what: str, error: OSError) -> AddressError:
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return AddressError(f"{what}: {name}, {error.strerror or error}", FIXES.get(name, "is the server running?"))
