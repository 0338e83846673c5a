"""Write in the background: one task at a time, in a thread of low priority."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

NICE = 10  # a tenth of a busy core; 19 would be a seventieth, so that 0.3 s of work would take 20 s


class BackgroundWriter:
    """Runs one task at a time, each in its own thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._raised: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Wait for the previous task, then run this one in the background.

        Raises:
            The exception of the previous task, if any.
        """
        self.wait()
        # Not a daemon: the interpreter must not exit in the middle of a write.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current task, and raise its exception, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _run(self, work: Callable[[], None]) -> None:
        _lower_priority()
        try:
            work()
        except BaseException as error:
            self._raised = error


def _lower_priority() -> None:
    """Lower the priority of this thread, if the system allows it."""
    if sys.platform == "linux":  # elsewhere, the priority is that of the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
