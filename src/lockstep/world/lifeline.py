"""The lifeline: tells every worker within milliseconds that another has ended, also while nobody communicates.

Each worker holds a connection to the worker on its right and waits, in a thread of its own, for a word from the left. A
worker that shuts down sends one; the operating system closes the connection of one that dies, and keep-alive probes
notice within seconds that a host is gone. Either way the news is passed on to the right, once around.

The connections are plain sockets, since a thread that waits in Gloo cannot be woken by its own process: it would have
to stay behind at a good end, and woken while the interpreter ends, it aborts the process.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.errors import WorldError, first_line
from lockstep.world.interfaces import own_address

if TYPE_CHECKING:
    from torch.distributed import Store

NEWS = struct.Struct("<II")  # what, and which rank
FINISHED, LOST = 1, 2
STRANGER_SECONDS = 2.0  # for somebody who connects to give the password
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, seconds, probes: 11 s in all


class Lifeline:
    """Watches the other workers.

    Args:
        store: Where the workers find each other.
        ended: Called with the rank that has ended and whether it was lost, once or more for each.

    Raises:
        WorldError: A neighbour cannot be reached within the time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_seconds: float,
        one_host: bool,
        ended: Callable[[int, bool], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._ended = ended
        self._closed = False
        self._lock = threading.Lock()
        try:
            self._left, self._right = _neighbours(store, rank, size, timeout_seconds, one_host)
        except (OSError, RuntimeError) as error:
            raise WorldError(
                f"worker {rank} on {socket.gethostname()} cannot connect to its neighbours: {first_line(error)}; "
                f"GLOO_SOCKET_IFNAME names the network interface to use"
            ) from error
        self._thread = threading.Thread(target=self._watch, name="lockstep-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the others that this worker has finished, and end the thread."""
        self._closed = True
        self._send(FINISHED, self._rank)
        _shut(self._left)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._left.close()
        self._right.close()

    def report_failure(self) -> None:
        """Tell the others that this worker is lost to them, although its process lives."""
        self._send(LOST, self._rank)

    def abandon(self) -> None:
        """In a forked child: close the child's copies of the connections."""
        self._left.close()
        self._right.close()

    def _watch(self) -> None:
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        while True:
            what, who = self._receive() or (LOST, left)
            if self._closed:
                return
            if who != right:
                self._send(what, who)  # before all else, which may take its time
            self._ended(who, what == LOST)
            if who == left:
                return

    def _receive(self) -> tuple[int, int] | None:
        """The next news from the left; None when the connection has ended."""
        try:
            message = self._left.recv(NEWS.size, socket.MSG_WAITALL)
        except OSError:
            return None
        what, who = NEWS.unpack(message) if len(message) == NEWS.size else (0, 0)
        return (what, who) if what in (FINISHED, LOST) and who < self._size else None

    def _send(self, what: int, who: int) -> None:
        with suppress(OSError), self._lock:  # the worker on the right may have ended too
            self._right.sendall(NEWS.pack(what, who))


def _neighbours(
    store: Store, rank: int, size: int, timeout_seconds: float, one_host: bool
) -> tuple[socket.socket, socket.socket]:
    """Connect to the right, and be connected to from the left, by whoever knows the password in the store."""
    with socket.create_server((own_address(one_host), 0)) as listener:
        password = secrets.token_bytes(16)
        host, port = listener.getsockname()[:2]
        store.set(f"lifeline/{rank}", f"{host} {port} {password.hex()}")
        host, port, theirs = store.get(f"lifeline/{(rank + 1) % size}").decode().split()
        right = socket.create_connection((host, int(port)), timeout_seconds)
        right.sendall(bytes.fromhex(theirs))
        listener.settimeout(timeout_seconds)
        while True:
            left, _ = listener.accept()
            left.settimeout(STRANGER_SECONDS)
            with suppress(OSError):
                if secrets.compare_digest(left.recv(len(password), socket.MSG_WAITALL), password):
                    break
            left.close()
    for connection in (left, right):
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):  # Linux has them all
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return left, right


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it may be closed from the other side
        connection.shutdown(socket.SHUT_RDWR)
