"""Time limits of tests grow with the machine's load."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import time_limits
from time_limits import Limit, extended, wait_until

from lockstep.world.devices import usable_cores


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The number of processes that want a core."""
    state = SimpleNamespace(now=0.0, processes=0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (state.processes, 0.0, 0.0))
    return state


@pytest.fixture
def clock(state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """This, and seconds that pass in sleeps alone."""

    def sleep(seconds: float) -> None:
        state.now += seconds

    monkeypatch.setattr(time_limits, "time", SimpleNamespace(monotonic=lambda: state.now, sleep=sleep))
    return state


def test_limit_grows_with_the_load(clock: SimpleNamespace) -> None:
    limit = Limit(10)
    clock.now = 15.0
    assert limit.left() == 0
    clock.processes = 2 * usable_cores()
    assert limit.left() == 5


@pytest.mark.parametrize(("cores_of_load", "seconds"), [(0, 3), (4, 12)])
def test_wait_ends_after_the_extended_limit(clock: SimpleNamespace, cores_of_load: int, seconds: float) -> None:
    clock.processes = cores_of_load * usable_cores()
    with pytest.raises(AssertionError, match=r"not within 3 s: of the job"):
        wait_until(lambda: False, 3, lambda: "of the job")
    assert clock.now == pytest.approx(seconds, abs=0.1)


def test_blocking_wait_is_repeated_while_the_load_extends_it(clock: SimpleNamespace) -> None:
    waits = []

    def wait(seconds: float) -> str:
        waits.append(seconds)
        clock.now += seconds
        clock.processes = 3 * usable_cores()
        raise subprocess.TimeoutExpired("program", seconds)

    with pytest.raises(subprocess.TimeoutExpired):
        extended(wait, 5)
    assert waits == [5, 10]


def test_tests_own_time_limit_is_extended(state: SimpleNamespace) -> None:
    struck: list[float] = []
    before = signal.getsignal(signal.SIGALRM)
    state.processes = 3.0 * usable_cores()
    signal.signal(signal.SIGALRM, lambda *_: struck.append(time.monotonic()))
    try:
        hook = time_limits.pytest_timeout_set_timer(SimpleNamespace(timeout=0.1))
        next(hook)
        with pytest.raises(StopIteration):  # pytest-timeout has set its handler
            next(hook)
        start, rest = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, 0.1)
        wait_until(lambda: struck, 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *rest)
        signal.signal(signal.SIGALRM, before)
    assert struck[0] - start >= 0.29
