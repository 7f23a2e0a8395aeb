"""Both ends of a link prove that they know the job token, before anything else is read.

The server sends a nonce; the client answers with its own and an HMAC-SHA256 over both; the server answers with another.
Messages are of fixed size, and the roles are part of what is signed, so that no answer serves the other side.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from paceline.errors import AuthError

MAGIC = b"paceline/1\n"
NONCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 32
FIX = "all processes of a job must have its token; is another job listening on this address?"


def proof(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, role + server_nonce + client_nonce, "sha256")


class ServerSide:
    """The server's half, without I/O: send `greeting`, `feed` what comes, send what that returns; then it is done.
    `peer` is what errors call the other side."""

    def __init__(self, token: bytes, peer: str = "a peer") -> None:
        self._token = token
        self._peer = peer
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._got = b""
        self.greeting = MAGIC + self._nonce

    @property
    def missing(self) -> int:
        """How many bytes are still to come; no more may be read."""
        return NONCE_BYTES + PROOF_BYTES - len(self._got)

    def feed(self, data: bytes) -> bytes | None:
        """The reply once all is there, else None. Raises AuthError when the peer's proof is wrong."""
        self._got += data
        if self.missing > 0:
            return None
        nonce, given = self._got[:NONCE_BYTES], self._got[NONCE_BYTES:]
        if not hmac.compare_digest(given, proof(self._token, b"client", self._nonce, nonce)):
            raise AuthError(f"{self._peer} did not prove that it knows the job token", FIX)
        return proof(self._token, b"server", self._nonce, nonce)


def prove(sock: socket.socket, token: bytes, address: str, deadline_s: float) -> None:
    """The client's half on a blocking socket, until `deadline_s` on the clock of `time.monotonic`.

    Raises AuthError when either side's proof is wrong or does not come in time.
    """
    try:
        greeting = _read(sock, GREETING_BYTES, deadline_s)
        if not greeting.startswith(MAGIC):
            raise AuthError(f"{address} is no paceline server", FIX)
        server_nonce, nonce = greeting[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        sock.sendall(nonce + proof(token, b"client", server_nonce, nonce))
        reply = _read(sock, PROOF_BYTES, deadline_s)
    except (EOFError, OSError) as error:
        raise AuthError(f"{address} did not accept this process: {error}", FIX) from None
    if not hmac.compare_digest(reply, proof(token, b"server", server_nonce, nonce)):
        raise AuthError(f"{address} did not prove that it knows the job token", FIX)


def _read(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise EOFError("it closed the link")
        data += chunk
    return data
