"""Writing in the background: one thing at a time, by a thread that gives way to those that train."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

NICE = 10  # a tenth of a core that training keeps busy; 19 is a seventieth, and 0.3 s of work would take 20


class BackgroundWriter:
    """Does one piece of work at a time in a thread, which lives as long as the piece takes."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._raised: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do this in the background, after the piece before it, for which this waits.

        Raises:
            What the piece before has raised.
        """
        self.wait()
        # No daemon: an interpreter that ends waits for it, as for a file that is being written.
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the piece at hand is done, and raise what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def _run(self, work: Callable[[], None]) -> None:
        _give_way()
        try:
            work()
        except BaseException as error:
            self._raised = error


def _give_way() -> None:
    """Leave the core to others that want it, as far as the system allows."""
    if sys.platform == "linux":  # elsewhere, a priority is the whole process's
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
