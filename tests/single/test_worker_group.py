"""Tests that run in workers fail if one of these fails, differs from the others or leaves something behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import worker_group
from worker_group import on_workers, run_in_workers

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


@on_workers(2)
def _fails_on_one(world: World) -> None:
    assert world.rank == 0


@on_workers(2)
def _differs(world: World) -> int:
    return world.rank


@pytest.mark.parametrize(
    ("test", "message"), [(_fails_on_one, r"^worker 1:\n(.*\n)*.*assert 1 == 0"), (_differs, None)]
)
def test_failing_or_differing_worker_fails_the_test(test: Callable[[], None], message: str | None) -> None:
    with pytest.raises(AssertionError, match=message) as error:
        test()
    assert "worker 0" not in str(error.value)
