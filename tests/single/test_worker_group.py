"""That a test fails whose workers leave something of ours behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import worker_group
from worker_group import run_in_workers

from lockstep.world.lifeline import Lifeline
from lockstep.world.world import World


def _leave_a_thread(_: World) -> None:
    threading.Thread(target=threading.Event().wait, name="lockstep-test", daemon=True).start()


def _leave_a_handler(_: World) -> None:
    signal.signal(signal.SIGUSR1, Lifeline.__init__)


@pytest.mark.parametrize(
    ("work", "what"), [(_leave_a_thread, "the thread lockstep-test"), (_leave_a_handler, "a handler of .*SIGUSR1")]
)
def test_it_is_named(monkeypatch: pytest.MonkeyPatch, work: Callable[[World], None], what: str) -> None:
    monkeypatch.setattr(worker_group, "SETTLE_SECONDS", 0.01)
    with pytest.raises(AssertionError, match=f"{work.__name__} leaves behind: {what}"):
        run_in_workers(1, work)
