"""Whether a machine has more busy threads than cores."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lockstep.diagnosis import oversubscription
from lockstep.diagnosis.oversubscription import INTERVAL_SECONDS, Oversubscription


@pytest.mark.skipif(not oversubscription.PRESSURE.exists(), reason="the load average takes a minute to rise")
def test_more_busy_processes_than_cores_are_noticed() -> None:
    busy = []
    for _ in range(2 * (os.cpu_count() or 1)):
        busy.append(os.fork())
        if not busy[-1]:
            while True:
                pass
    try:
        watched = Oversubscription()
        assert not watched.check()  # no second has passed
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
def test_waiting_threads_count_if_no_core_is_idle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waited: float | None, load: float, idle: float, found: bool
) -> None:
    pressure = tmp_path / "cpu"
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(oversubscription, "PRESSURE", pressure)

    def move_to(seconds: float) -> None:
        monkeypatch.setattr(time, "monotonic", lambda: seconds)
        monkeypatch.setattr(oversubscription, "_idle_seconds", lambda: idle * seconds)
        if waited is not None:
            pressure.write_text(f"some avg10=0.00 avg300=3.65 total={1e6 * waited * seconds:.0f}\nfull total=0\n")

    move_to(0.0)
    watched = Oversubscription()
    move_to(10.0)
    assert watched.check() is found
