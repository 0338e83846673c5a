"""Whether a machine has more busy threads than cores."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lockstep.diagnosis.oversubscription import INTERVAL_SECONDS, PRESSURE, Oversubscription, Reading, waited_seconds


@pytest.mark.skipif(not PRESSURE.exists(), reason="the load average takes a minute to rise")
def test_more_busy_processes_than_cores_are_noticed() -> None:
    busy = []
    for _ in range(2 * (os.cpu_count() or 1)):
        busy.append(os.fork())
        if not busy[-1]:
            while True:
                pass
    try:
        watched = Oversubscription()
        time.sleep(INTERVAL_SECONDS)
        assert watched.check()
    finally:
        for child in busy:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("waited", "load", "idle", "found"),
    [
        (0.9, 0.0, 0.0, True),
        (0.1, 9.0, 0.0, False),
        (0.9, 9.0, 0.5, False),
        (None, 9.0, 0.0, True),  # a kernel without such reports
        (None, 1.0, 0.0, False),
    ],
)
def test_waiting_threads_count_if_no_core_is_idle(waited: float | None, load: float, idle: float, found: bool) -> None:
    start = Reading(0.0, waited and 0.0, 0.0, load, cores=1)
    assert Reading(10.0, waited and 10 * waited, 10 * idle, load, cores=1).is_busy_since(start) is found


def test_pressure_is_read_if_the_kernel_has_it(tmp_path: Path) -> None:
    assert waited_seconds(tmp_path / "cpu") is None
    (tmp_path / "cpu").write_text("some avg10=0.00 avg300=3.65 total=9000000\nfull total=0\n")
    assert waited_seconds(tmp_path / "cpu") == 9.0


@pytest.mark.parametrize(("idle", "busy"), [(0.0, 4.0), (1.0, 3.5), (8.0, 0.0), (9.0, 0.0), (-1.0, 4.0)])
def test_cores_that_are_not_idle_are_busy(idle: float, busy: float) -> None:
    last = Reading(time_seconds=10.0, waited_seconds=None, idle_seconds=100.0, load=0.0, cores=4)
    assert Reading(12.0, None, 100.0 + idle, 0.0, 4).busy_cores_since(last) == busy
