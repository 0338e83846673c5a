"""The time in which workers make no progress."""

from __future__ import annotations

from lockstep.diagnosis.board import BoardContent
from lockstep.diagnosis.idle_clock import IdleClock

NO_PROCESS = 1 << 30


def test_pause_of_the_watching_process_counts_little() -> None:
    now = iter([0.0, 1.0, 2.0, 1002.0])
    clock, workers = IdleClock(1e9, now.__next__), [BoardContent(NO_PROCESS, 0)]
    assert clock.tick_seconds == 1.0
    assert [clock.tick(workers) for _ in range(3)] == [0.0, 1.0, 3.0]
