"""What the training loop reports: the figures of steps, epochs and evaluations, over all workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.data.progressive import side_at
from lockstep.data.readers import Batch
from lockstep.errors import NonFiniteLossError
from lockstep.train import checkpoint
from lockstep.train.metrics import Totals
from lockstep.train.setup import Job


class Interval:
    """The time since the last report, and how much of it was spent waiting for data."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.wait_seconds = 0.0

    def next_of(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time until it is there counts as waiting."""
        start = time.perf_counter()
        batch = next(batches)
        self.wait_seconds += time.perf_counter() - start
        return batch

    def seconds(self) -> float:
        return time.perf_counter() - self._start


def report_steps(job: Job, interval: Interval) -> None:
    """Reduce the steps since the last report over the workers, check them, and record them.

    Raises:
        NonFiniteLossError: A step's loss was NaN or infinite; raised on all workers alike.
    """
    progress = job.progress
    steps = job.meter.reduce()  # waits for the device, so the time below is that of finished work
    _check_finite(job, steps)
    totals, seconds = sum(steps, Totals()), interval.seconds()
    progress.add_interval(steps, seconds, interval.wait_seconds)
    job.tracker.record(
        {
            "kind": "step",
            "epoch": (progress.step - 1) // job.steps_per_epoch + 1,
            **_common(job, totals, seconds),
            "lr": job.schedule.rate(progress.step - 1),
            "data_wait": interval.wait_seconds / seconds,
        }
    )


def report_stop(job: Job, reason: str) -> None:
    """Record that the session ends here on request."""
    progress = job.progress
    job.tracker.record(
        {
            "kind": "stop",
            "step": progress.step,
            "time_seconds": progress.seconds,
            "unix_time": time.time(),
            "reason": reason,
        }
    )


def report_training(job: Job) -> None:
    """Record the training of the epoch that ends, from its start, also if that was before a resume."""
    progress = job.progress
    if not progress.epoch_totals.count:
        return
    share = progress.epoch_wait_seconds / progress.epoch_seconds
    record = _epoch_record(job, "train", progress.epoch_totals, progress.epoch_seconds)
    side = side_at(job.config.data.sizes_by_epoch, record["epoch"] - 1)
    job.tracker.record(record | {"data_wait": share} | ({"side": side} if side else {}))


def report_evaluation(job: Job, totals: Totals, seconds: float) -> None:
    """Record an evaluation."""
    job.tracker.record(_epoch_record(job, "val", totals, seconds))


def _epoch_record(job: Job, split: str, totals: Totals, seconds: float) -> dict[str, Any]:
    return {
        "kind": "epoch",
        "split": split,
        "epoch": -(-job.progress.step // job.steps_per_epoch),
        "epochs": job.config.epochs,
        **_common(job, totals, seconds),
        "epoch_seconds": seconds,
    }


def _common(job: Job, totals: Totals, seconds: float) -> dict[str, Any]:
    return {
        "step": job.progress.step,
        **totals.figures(),
        "images_per_second": totals.count / seconds,
        "time_seconds": job.progress.seconds,
        "unix_time": time.time(),
    }


def _check_finite(job: Job, steps: list[Totals]) -> None:
    """Refuse to go on from a step whose loss was NaN or infinite; no checkpoint has been written since."""
    first = job.progress.step - len(steps) + 1
    for step, totals in enumerate(steps, start=first):
        if not math.isfinite(totals.loss):
            raise NonFiniteLossError(
                f"the loss is {totals.loss / totals.count} at step {step} (epoch "
                f"{(step - 1) // job.steps_per_epoch + 1}, learning rate {job.schedule.rate(step - 1):g}). "
                f"{advice(job)}"
            )


def list_left_out(paths: Sequence[str]) -> list[str]:
    """Lines that count and name the files left out; none where there are none."""
    return [f"left out {len(paths)} images that cannot be decoded:", *paths] if paths else []


def advice(job: Job) -> str:
    """What to do when training has gone out of bounds."""
    good = checkpoint.newest(job.folder.checkpoints) or "none yet"
    return f"The last good checkpoint: {good}. Lower --lr, lengthen --warmup-epochs or add --clip-norm 1"
