"""A host's connections to the previous and the next host of the chain, which carry the stream.

Both sides first prove by an HMAC over challenges that they have the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from lockstep.errors import LockstepError
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, proof
from lockstep.launch.staging.tar_stream import CopyError

STALL_SECONDS = 300.0  # without a byte from the previous host, or a byte that the next one accepts
CONNECT_SECONDS = 10.0
ADMIT_SECONDS = 5.0  # less, because the next host may wait behind another peer
PROOF_BYTES = 32
SENDS, RECEIVES = "sends a copy", "receives a copy"


class PeerError(LockstepError):
    """Another host has disconnected or stalled; it reports the reason."""


def accept(listeners: Sequence[socket.socket], secret: str) -> socket.socket:
    """Return the next host's connection, and disconnect other peers.

    Raises:
        PeerError: It does not connect.
    """
    with ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        while ready := select.select(listeners, [], [], STALL_SECONDS)[0]:
            with suppress(OSError):
                connection, _ = ready[0].accept()
                if _is_proven(connection, secret, SENDS, RECEIVES, ADMIT_SECONDS):
                    return connection
    raise PeerError(f"the next host has not connected within {STALL_SECONDS:g} s")


def connect(upstream: Mapping[str, int], host: str, secret: str) -> socket.socket:
    """Connect to the previous host, which may have addresses that are another machine's here.

    Args:
        upstream: Its addresses and ports.

    Raises:
        CopyError: It cannot be reached.
    """
    for address, port in upstream.items():
        with suppress(OSError):
            connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            if _is_proven(connection, secret, RECEIVES, SENDS, CONNECT_SECONDS):
                return connection
    raise CopyError(
        f"cannot reach {host} at any of its addresses ({', '.join(upstream)}); is there a firewall between them? "
        "--interface names the network to use"
    )


def _is_proven(connection: socket.socket, secret: str, own_role: str, other_role: str, seconds: float) -> bool:
    """Prove the secret to a peer, and return whether it has it, too; close the connection if it has not."""
    try:
        connection.settimeout(seconds)
        connection.sendall(own := secrets.token_bytes(CHALLENGE_BYTES))
        other = _exactly(connection, CHALLENGE_BYTES)
        connection.sendall(proof(secret, own_role, other))
        is_proven = hmac.compare_digest(_exactly(connection, PROOF_BYTES), proof(secret, other_role, own))
        connection.settimeout(STALL_SECONDS)
    except OSError:
        is_proven = False
    if not is_proven:
        connection.close()
    return is_proven


class PassedStream:
    """A stream that is passed on to the next host as it is read. `sha256` and `size` count the bytes so far.

    Args:
        receive: Returns at most so many bytes; none at the end.
        following: The connection to the next host.
        names: The previous host and the next one.
    """

    def __init__(
        self, receive: Callable[[int], bytes], following: socket.socket | None, names: tuple[str, str]
    ) -> None:
        self._receive = receive
        self._following = following
        self._names = names
        self.sha256 = hashlib.sha256()
        self.size = 0

    def read(self, size: int, /) -> bytes:
        peer = self._names[0]
        try:
            data = self._receive(size)
            peer = self._names[1]
            if self._following:
                self._following.sendall(data)
        except OSError as error:
            raise PeerError(f"lost the connection to {peer}: {error}") from None
        self.sha256.update(data)
        self.size += len(data)
        return data


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("disconnected")
        data += part
    return data
