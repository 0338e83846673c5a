"""A host's connections to the previous and the next host of the chain, which carry a stream in chunks.

Each chunk follows its length; the length 0 ends the stream, and its SHA-256 follows. Both sides first prove by an HMAC
over challenges that they have the job's secret.
"""

from __future__ import annotations

import hashlib
import hmac
import queue
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from lockstep.errors import LockstepError
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, listen, proof
from lockstep.launch.staging.tar_stream import CopyError
from lockstep.world.interfaces import addresses

STALL_SECONDS = 300.0  # without a byte from the previous host, or a byte that the next one accepts
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 1.0
WAITING = 16  # chunks to be sent
HEAD = struct.Struct("!I")
DIGEST_BYTES = 32  # of a SHA-256, and of an HMAC with it
SENDS, RECEIVES = "sends a copy", "receives a copy"


class PeerError(LockstepError):
    """Another host has disconnected or stalled; it reports the reason."""


class NextHost:
    """Listens on all addresses for the next host, and disconnects other peers. `ports` are the ports, by address."""

    def __init__(self, secret: str, interfaces: Sequence[str]) -> None:
        self._secret = secret
        self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._is_over = False
        self.ports: dict[str, int] = {}
        for _, address in addresses(interfaces):
            with suppress(OSError):  # an address that cannot be bound is not reachable either
                listener = listen(address)
                self.ports[address] = listener.getsockname()[1]
                threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def accept(self, host: str) -> socket.socket:
        """Return the next host's connection.

        Raises:
            PeerError: It does not connect.
        """
        try:
            return self._accepted.get(timeout=STALL_SECONDS)
        except queue.Empty:
            raise PeerError(f"{host} has not connected within {STALL_SECONDS:g} s") from None
        finally:
            self.close()

    def close(self) -> None:
        """Stop listening, within a second."""
        self._is_over = True

    def _serve(self, listener: socket.socket) -> None:
        listener.settimeout(LOOK_SECONDS)
        with listener:
            while not self._is_over:
                with suppress(OSError):  # above all, that nothing connects
                    connection, _ = listener.accept()
                    threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Keep a connection if its peer has the job's secret."""
        with suppress(OSError):
            connection.settimeout(CONNECT_SECONDS)
            challenges = _exactly(connection, CHALLENGE_BYTES) + (own := secrets.token_bytes(CHALLENGE_BYTES))
            connection.sendall(own + proof(self._secret, SENDS, challenges))
            if hmac.compare_digest(_exactly(connection, DIGEST_BYTES), proof(self._secret, RECEIVES, challenges)):
                connection.settimeout(STALL_SECONDS)
                self._accepted.put(connection)
                return
        connection.close()


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
            with suppress(OSError):
                challenge = secrets.token_bytes(CHALLENGE_BYTES)
                connection.sendall(challenge)
                challenges = challenge + _exactly(connection, CHALLENGE_BYTES)
                if hmac.compare_digest(_exactly(connection, DIGEST_BYTES), proof(secret, SENDS, challenges)):
                    connection.sendall(proof(secret, RECEIVES, challenges))
                    connection.settimeout(STALL_SECONDS)
                    return connection
            connection.close()
    raise CopyError(
        f"cannot reach {host} at any of its addresses ({', '.join(upstream)}); is there a firewall between them? "
        "--interface names the network to use"
    )


def received(connection: socket.socket, host: str) -> Iterator[bytes]:
    """Yield the stream's chunks.

    Raises:
        PeerError: The previous host disconnects or stalls.
        CopyError: The stream was damaged.
    """
    digest = hashlib.sha256()
    try:
        while size := HEAD.unpack(_exactly(connection, HEAD.size))[0]:
            chunk = _exactly(connection, size)
            digest.update(chunk)
            yield chunk
        is_whole = _exactly(connection, DIGEST_BYTES) == digest.digest()
    except TimeoutError:
        raise PeerError(f"{host} has sent nothing for {STALL_SECONDS:g} s") from None
    except OSError as error:
        raise PeerError(f"lost the connection to {host}: {error}") from None
    if not is_whole:
        raise CopyError(f"the files were damaged on their way from {host}; start the job again")


def sender(connection: socket.socket, host: str) -> Callable[[bytes], None]:
    """Return a function that sends a chunk in the background or, if it is empty, ends the stream and waits for it."""
    pool, sending, digest = ThreadPoolExecutor(1), deque[Future[None]](), hashlib.sha256()

    def send_now(chunk: bytes) -> None:
        digest.update(chunk)
        connection.sendall(HEAD.pack(len(chunk)) + (chunk or digest.digest()))

    def send(chunk: bytes) -> None:
        sending.append(pool.submit(send_now, chunk))
        try:
            while sending and (not chunk or len(sending) > WAITING):
                sending.popleft().result()
        except OSError as error:
            raise PeerError(f"lost the connection to {host}: {error}") from None

    return send


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes.

    Raises:
        OSError: The peer disconnects, or sends nothing for too long.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view:
        size = connection.recv_into(view)
        if not size:
            raise ConnectionResetError("disconnected")
        view = view[size:]
    return bytes(data)
