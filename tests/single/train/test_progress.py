"""Counts and sums of a training."""

from __future__ import annotations

from lockstep.train.metrics import Totals
from lockstep.train.progress import Progress
from lockstep.train.worker_times import Times


def test_sums_of_an_epoch_end_with_it() -> None:
    progress = Progress()
    progress.add_interval([Totals(1.0, 1.0, 1.0, 2.0)], Times(3.0, {"data_wait": 1.0}))
    assert (progress.epoch_seconds, progress.epoch_wait_seconds, progress.epoch_totals.count) == (3.0, 1.0, 2.0)
    progress.end_epoch()
    assert (progress.open_times, progress.open_totals.count) == ((3.0, 1.0), 2.0)  # until the record of the steps
    assert progress.epoch_totals == Progress().epoch_totals
