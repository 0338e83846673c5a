"""The thread that runs checks."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from lockstep.hvd.monitoring.store_watch import StoreWatch

TIMEOUT_SECONDS = 30


class Counted:
    """A check that counts its runs, and raises an error in one of them."""

    def __init__(self, interval_seconds: float, fails_at: int = 0) -> None:
        self.interval_seconds = interval_seconds
        self.runs = 0
        self.third = threading.Event()
        self._fails_at = fails_at

    def check(self, store: Any) -> None:
        self.runs += 1
        store.set("key", "value")
        if self.runs == self._fails_at:
            raise RuntimeError("the store is closed")
        if self.runs == 3:
            self.third.set()


def _store() -> Any:
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", 0, is_master=True))


def test_each_check_has_its_own_interval_until_close() -> None:
    often, rarely = Counted(0.01), Counted(3600.0)
    watch = StoreWatch(_store(), [often, rarely])
    assert often.third.wait(TIMEOUT_SECONDS)
    watch.close()
    watch._thread.join(TIMEOUT_SECONDS)
    assert not watch._thread.is_alive()
    assert rarely.runs == 0


def test_the_thread_ends_when_the_store_is_closed() -> None:
    check = Counted(0.01, fails_at=2)
    watch = StoreWatch(_store(), [check])
    watch._thread.join(TIMEOUT_SECONDS)
    assert not watch._thread.is_alive()
    assert check.runs == 2
    watch.close()


def test_disabled_checks_start_no_thread() -> None:
    watch = StoreWatch(dist.HashStore(), [])
    assert not watch._thread.is_alive()
    watch.close()
