"""The time in which workers make no progress."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lockstep.diagnosis import idle_clock
from lockstep.diagnosis.board import BoardContent
from lockstep.diagnosis.idle_clock import IdleClock

NO_PROCESS = 1 << 30


def test_pause_of_the_watching_process_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 2.0, 1002.0])
    monkeypatch.setattr(idle_clock, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock, workers = IdleClock(limit=1e9), [BoardContent(NO_PROCESS, 0)]
    assert clock.tick_seconds == 1.0
    assert [clock.tick(workers) for _ in range(3)] == [0.0, 1.0, 3.0]
