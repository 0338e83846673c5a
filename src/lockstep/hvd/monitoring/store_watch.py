"""The thread that runs periodic checks over the job's store: one thread and one connection for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol


class Check(Protocol):
    """What runs periodically."""

    interval_seconds: float

    def check(self, store: Any) -> None:
        """Run once.

        Raises:
            RuntimeError: The store is closed, so the job is over.
        """


class StoreWatch:
    """Runs checks at their intervals, in a separate thread, until `close` or until the store is closed.

    Args:
        store: The job's store.
    """

    def __init__(self, store: Any, checks: Sequence[Check]) -> None:
        self._store = store
        self._checks = checks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lockstep-hvd-store-watch", daemon=True)
        if checks:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        if self._checks and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _watch(self) -> None:
        due = [time.monotonic() + check.interval_seconds for check in self._checks]
        own_connection = None  # needed because another thread may block on the store
        while not self._ended.wait(max(0.0, min(due) - time.monotonic())):
            try:
                own_connection = own_connection or self._store.clone()
                for index, check in enumerate(self._checks):
                    if time.monotonic() >= due[index]:
                        check.check(own_connection)
                        due[index] = time.monotonic() + check.interval_seconds
            except RuntimeError:  # the store is closed
                return
