"""The end of a worker whose accelerator waits for another worker that is lost.

On the CPU a collective fails when a peer is gone. On a GPU it is a kernel that waits, and the main thread waits for the
device: neither error nor signal reaches it, and not every launcher ends the other workers. Aborting the collective
would let the device go on with part of a sum, which the script could save; so the process ends instead.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.errors import LostPeerError
from lockstep.world.launcher_environment import Place
from lockstep.world.lifeline import Lifeline

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_SECONDS = 5.0  # for the main thread to find the error itself
WRITE_SECONDS = 120.0  # for what is being written, of a state from before
POLL_SECONDS = 0.05

_writes: list[object] = []  # one for each that is under way


@contextmanager
def unbroken() -> Iterator[None]:
    """Around a write of a whole state, which an end of this process need not cut off."""
    token = object()
    _writes.append(token)
    try:
        yield
    finally:
        _writes.remove(token)


def print_error(error: LostPeerError) -> int:
    """Tell the terminal; the error's exit code."""
    print(f"lockstep: error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


_tell: list[Callable[[LostPeerError], int]] = [print_error]  # the last one counts


def end_process(error: LostPeerError) -> None:
    """End this process when what is being written is whole, and say why, as whoever has connected the worker does."""
    deadline = time.monotonic() + WRITE_SECONDS
    while _writes and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    code = _tell[-1](error)
    sys.stdout.flush()
    os._exit(code)


class LossWatch:
    """Watches the other workers, and ends this one when one is lost.

    Args:
        store: Where the workers find each other; all of them begin to watch.
        tell: Called before the end, also by hvd's; returns the exit code.

    Raises:
        WorldError: A neighbour cannot be reached within the time.
    """

    def __init__(
        self, place: Place, store: Store, timeout_seconds: float, tell: Callable[[LostPeerError], int] = print_error
    ) -> None:
        self._tell = tell
        self._standing_down = threading.Event()
        _tell.append(tell)
        one_host = place.local_size == place.size
        self._lifeline = Lifeline(store, place.rank, place.size, timeout_seconds, one_host, self._ended)

    def stand_down(self) -> None:
        """This worker ends for a reason of its own, or goes on alone, whatever becomes of the others."""
        self._standing_down.set()

    def close(self) -> None:
        """Tell the others that this worker has come to a good end."""
        self.stand_down()
        _tell.remove(self._tell)
        self._lifeline.close()

    def _ended(self, rank: int, lost: bool) -> None:
        """Another worker has ended; called in the lifeline's thread."""
        if lost and not self._standing_down.wait(PATIENCE_SECONDS):
            end_process(
                LostPeerError(
                    f"worker {rank} was lost: its process has ended or its host cannot be reached; this one ends too, "
                    f"as its GPU waits for it"
                )
            )
