"""Notice within milliseconds that another worker exited, and end a worker whose accelerator waits for it.

The workers form a ring. Each has a connection to its right neighbor and reads from its left neighbor in a thread. A
worker that shuts down sends a message; if it dies, the operating system closes its connection, and keep-alive probes
detect a dead host within seconds. Each worker forwards the message to the right, once around the ring. The connections
are plain sockets because a thread that waits in Gloo cannot be woken by its own process: it would still run at exit,
and if it wakes while the interpreter shuts down, it aborts the process.

On the CPU, a collective fails when a peer dies. On a GPU, a kernel waits for the peer and the main thread waits for the
device: neither an error nor a signal reaches it, and not every launcher ends the other workers. If the collective were
aborted, the device would continue with a partial sum, which the script could save. So the process exits instead, unless
it stays and goes back to an earlier state (`lockstep.world.generations`): then `GroupAbort` aborts what waits.

torch's own function for that clears the registry of groups after the last abort. An abort may take longer than the
other workers need to connect again, and then the groups of the next generation would be removed. Here, threads abort,
and only the main thread changes the registry.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from lockstep.errors import DeviceError, LockstepError, LostPeerError, WorldError, first_line
from lockstep.files.output import report_to_launcher, say
from lockstep.world import accelerator
from lockstep.world.interfaces import own_address
from lockstep.world.launcher_environment import RankInfo

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

MESSAGE = struct.Struct("<II")  # FINISHED or LOST, rank
FINISHED, LOST = 1, 2
PASSWORD_SECONDS = 2.0  # timeout for the password of an incoming connection
SILENT_SECONDS = 11.0  # until a host that does not answer is considered dead


class Lifeline:
    """Watches the other workers.

    Args:
        store: The store for the rendezvous.
        ended: Called as `ended(rank, died)` at least once for each worker that exits.

    Raises:
        WorldError: A neighbor cannot be reached within the time.
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
            self._left, self._right = _neighbors(store, rank, size, timeout_seconds, one_host)
        except (OSError, RuntimeError) as error:
            raise WorldError(
                f"worker {rank} on {socket.gethostname()} cannot connect to its neighbors: {first_line(error)}; "
                f"GLOO_SOCKET_IFNAME sets the network interface"
            ) from error
        self._thread = threading.Thread(target=self._watch, name="lockstep-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report to the others that this worker has finished, and end the thread."""
        self._closed = True
        self._send(FINISHED, self._rank)
        with suppress(OSError):  # the other side may have closed it
            self._left.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._left.close()
        self._right.close()

    def report_failure(self) -> None:
        """Report to the others that this worker has failed, although its process still runs."""
        self._send(LOST, self._rank)

    def abandon(self) -> None:
        """In a forked child: close the child's copies of the connections."""
        self._left.close()
        self._right.close()

    def _watch(self) -> None:
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        while True:
            event, rank = self._receive() or (LOST, left)
            if self._closed:
                return
            if rank != right:
                self._send(event, rank)  # first, because `ended` may take long
            self._ended(rank, event == LOST)
            if rank == left:
                return

    def _receive(self) -> tuple[int, int] | None:
        """Return the next message from the left; None if the connection is closed."""
        try:
            message = self._left.recv(MESSAGE.size, socket.MSG_WAITALL)
        except OSError:
            return None
        event, rank = MESSAGE.unpack(message) if len(message) == MESSAGE.size else (0, 0)
        return (event, rank) if event in (FINISHED, LOST) and rank < self._size else None

    def _send(self, event: int, rank: int) -> None:
        with suppress(OSError), self._lock:  # the right neighbor may have exited too
            self._right.sendall(MESSAGE.pack(event, rank))


def _neighbors(
    store: Store, rank: int, size: int, timeout_seconds: float, one_host: bool
) -> tuple[socket.socket, socket.socket]:
    """Connect to the right neighbor, and accept the left one, which sends the password from the store."""
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
            left.settimeout(PASSWORD_SECONDS)
            with suppress(OSError):
                if secrets.compare_digest(left.recv(len(password), socket.MSG_WAITALL), password):
                    break
            left.close()
    for connection in (left, right):
        connection.settimeout(None)
        detect_loss(connection, SILENT_SECONDS)
    return left, right


def detect_loss(connection: socket.socket, seconds: float) -> None:
    """Let a connection break if its peer is silent, although the kernel asks it for a sign of life."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third = max(1, int(seconds / 3))
    settings = {"TCP_KEEPIDLE": third, "TCP_KEEPALIVE": third, "TCP_KEEPINTVL": third, "TCP_KEEPCNT": 2}
    for name, value in (settings | {"TCP_USER_TIMEOUT": int(1000 * seconds)}).items():
        if hasattr(socket, name):  # those of this system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


PATIENCE_SECONDS = 5.0  # for the main thread to raise the error itself
WRITE_SECONDS = 120.0  # for a write in progress, of an earlier state
POLL_SECONDS = 0.05

_writes: list[int] = []  # the threads of the writes in progress


@contextmanager
def defer_exit() -> Iterator[None]:
    """Make `end_process` wait, up to WRITE_SECONDS, until the block has finished writing a complete state."""
    _writes.append(threading.get_ident())
    try:
        yield
    finally:
        _writes.remove(threading.get_ident())


@contextmanager
def allow_exit() -> Iterator[None]:
    """Within `defer_exit`, let `end_process` not wait for this block."""
    _writes.remove(threading.get_ident())
    try:
        yield
    finally:
        _writes.append(threading.get_ident())


def print_error(error: LockstepError) -> int:
    """Print the error to stderr and return its exit code."""
    say(f"lockstep: error: {error}")
    return error.exit_code


Report = Callable[[LockstepError], int]
_reports: list[Report] = [print_error]  # the last one is in effect


def end_process(error: LockstepError, report: Report | None = None) -> None:
    """Report the error and exit, once writes in progress are done.

    Args:
        report: Returns the exit code; None: the report of the latest `LossWatch`.
    """
    deadline = time.monotonic() + WRITE_SECONDS
    while _writes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    code = (report or _reports[-1])(error)
    for child in multiprocessing.active_children():  # loader processes, which may be stuck
        child.kill()
    sys.stdout.flush()
    os._exit(code)


class LossWatch:
    """Watches the other workers, and ends this one, or what it waits for, when one dies.

    Args:
        store: The store for the rendezvous. Every worker creates a watch.
        report: Called before this process ends, also by hvd's watch; returns the exit code.
        abort: Called when another worker dies, instead of ending this one: aborts what waits for it.

    Raises:
        WorldError: A neighbor cannot be reached within the time.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        store: Store,
        timeout_seconds: float,
        report: Report = print_error,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._report = report
        self._abort = abort
        self._disarmed = threading.Event()
        _reports.append(report)
        one_host = rank_info.local_size == rank_info.size
        self._lifeline = Lifeline(store, rank_info.rank, rank_info.size, timeout_seconds, one_host, self._ended)

    def disarm(self) -> None:
        """Ignore further exits of other workers, because this worker is exiting or continues alone."""
        self._disarmed.set()

    def close(self) -> None:
        """Report to the others that this worker has finished."""
        self.disarm()
        _reports.remove(self._report)
        self._lifeline.close()

    def _ended(self, rank: int, lost: bool) -> None:
        """Handle the end of another worker, in the lifeline's thread."""
        if lost and self._abort:
            if not self._disarmed.is_set():
                self._abort()
        elif lost and not self._disarmed.wait(PATIENCE_SECONDS):
            end_process(
                LostPeerError(
                    f"worker {rank} disconnected: its process exited or its host is unreachable; this worker exits "
                    f"too, because its GPU waits for that worker"
                )
            )


DEVICE_SECONDS = 20.0  # for the work of a few steps that is still enqueued


class GroupAbort:
    """Aborts all groups of this process, once.

    Args:
        device: The device of the groups.

    Attributes:
        seconds: How long a call waits for the end, which delays the exit of a failed process.
        long_seconds: After this time, `finish` prints that it waits.
    """

    seconds, long_seconds = 3.0, 10.0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.has_begun = False

    def __call__(self) -> None:
        """Start to abort, in any thread, unless another has; wait a while for the end."""
        import torch.distributed as dist

        with self._lock:
            if not self.has_begun:
                self.has_begun = True
                # A thread each: a communicator's abort may wait for a kernel that waits for another communicator's.
                for group in list(dist.distributed_c10d._world.pg_names):
                    self._threads.append(threading.Thread(target=self._abort, args=[group], daemon=True))
                    self._threads[-1].start()
        self._wait(self.seconds)

    def _abort(self, group: Any) -> None:
        accelerator.use(self._device)  # a new thread's current device is 0, which another worker may use
        try:
            group.abort()
        except RuntimeError as error:
            say(f"lockstep: a process group cannot be aborted: {first_line(error)}")

    def _wait(self, seconds: float) -> bool:
        with self._lock:
            threads, deadline = list(self._threads), time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def drop_groups(self) -> None:
        """Remove the groups from torch's registry, if all aborts have ended; only in the main thread."""
        import torch.distributed as dist

        if self._wait(0.0) and dist.is_initialized():
            dist.distributed_c10d._world.pg_names.clear()  # torch would shut these groups down
            dist.destroy_process_group()

    def finish(self) -> None:
        """Remove the groups from torch's registry when all aborts have ended; only in the main thread.

        Until then, the device and its memory are not free for the groups of another generation. If the device cannot be
        used any more, this process exits.
        """
        if not self._wait(long := self.long_seconds):
            say(f"lockstep: aborting the collectives takes longer than {long:g} s; this worker waits for that")
            for thread in self._threads:
                thread.join()
        exit_if_unusable(self._device)
        self.drop_groups()


def exit_if_unusable(device: torch.device, before_exit: Callable[[], None] = lambda: None) -> None:
    """After a loss, end this process if its device fails or hangs, so that it is replaced with the lost one."""
    if why := accelerator.why_unusable(device, DEVICE_SECONDS):
        before_exit()
        where = f"worker {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        text = f"{where} is replaced, too: its {device.type} device cannot be used after the loss of another: {why}"
        end_process(DeviceError(text), _report_consequence)


def _report_consequence(error: LockstepError) -> int:
    report_to_launcher(f"error: {error}", True, error.exit_code, final=False)
    return print_error(error)
