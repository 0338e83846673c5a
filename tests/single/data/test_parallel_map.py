"""The work of many processes: results, and an end that leaves none behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator

import pytest
from packs import slow
from time_limits import wait_until

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
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        list(run_all(slow, _InterruptedAt([10_000.0] * 12), 2))
    # Ended ones may be listed for a moment, while the pool's own thread is being told of their end.
    wait_until(lambda: set(multiprocessing.active_children()) == before)
