"""The work of many processes: results, and an end that leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest
from packs import slow

from lockstep.data.parallel_map import run_all

pytestmark = pytest.mark.cold


class _InterruptedAt(list[float]):
    """Tasks, of which to hand out the third is met by Ctrl-C."""

    def __iter__(self) -> Iterator[float]:
        for number, task in enumerate(super().__iter__()):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield task


def test_every_task_is_returned_with_its_result() -> None:
    assert sorted(run_all(slow, [0.0, 0.1, 0.2, 0.3], 2)) == [(0.0, 0.0), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]


def test_ctrl_c_while_tasks_are_handed_out_ends_at_once() -> None:
    begin, before = time.monotonic(), multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        list(run_all(slow, _InterruptedAt([30.0] * 12), 2))
    # Ended ones may be listed for a moment, while the pool's own thread is being told of their end.
    while set(multiprocessing.active_children()) != set(before) and time.monotonic() - begin < 15:
        time.sleep(0.01)
    assert set(multiprocessing.active_children()) == set(before)
    assert time.monotonic() - begin < 15
