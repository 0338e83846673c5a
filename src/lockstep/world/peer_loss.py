"""End a worker whose accelerator waits for a worker that died.

On the CPU, a collective fails when a peer dies. On a GPU, a kernel waits for the peer and the main thread waits for the
device: neither an error nor a signal reaches it, and not every launcher ends the other workers. If the collective were
aborted, the device would continue with a partial sum, which the script could save. So the process exits instead.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError, LostPeerError
from lockstep.files.output import say
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.lifeline import Lifeline

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_SECONDS = 5.0  # for the main thread to raise the error itself
WRITE_SECONDS = 120.0  # for a write in progress, of an earlier state
POLL_SECONDS = 0.05

_writes: list[object] = []  # one for each write in progress


@contextmanager
def defer_exit() -> Iterator[None]:
    """Make `end_process` wait, up to WRITE_SECONDS, until the block has finished writing a complete state."""
    token = object()
    _writes.append(token)
    try:
        yield
    finally:
        _writes.remove(token)


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
    """Watches the other workers, and ends this one when one dies.

    Args:
        store: The store for the rendezvous. Every worker creates a watch.
        report: Called before this process ends, also by hvd's watch; returns the exit code.

    Raises:
        WorldError: A neighbor cannot be reached within the time.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        store: Store,
        timeout_seconds: float,
        report: Report = print_error,
    ) -> None:
        self._report = report
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
        if lost and not self._disarmed.wait(PATIENCE_SECONDS):
            end_process(
                LostPeerError(
                    f"worker {rank} disconnected: its process exited or its host is unreachable; this worker exits "
                    f"too, because its GPU waits for that worker"
                )
            )
