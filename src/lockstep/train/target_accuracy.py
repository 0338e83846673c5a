"""`--desired-acc`: stop training once an evaluation reaches this accuracy."""

from __future__ import annotations

import time
from datetime import timedelta

from lockstep.config.schema import TrainConfig
from lockstep.train.job import Job
from lockstep.train.progress import Progress


def is_reached(config: TrainConfig, progress: Progress) -> bool:
    """Return whether any evaluation of the run, even before a resume, reached --desired-acc; equal on all workers."""
    desired = config.run.desired_acc
    return desired is not None and progress.best_top1 >= desired


def report_reached(job: Job) -> None:
    """Record that the last evaluation reached --desired-acc."""
    progress = job.progress
    job.tracker.record(
        {
            "kind": "desired",
            "step": progress.step,
            "epoch": _epoch(progress.step, job.steps_per_epoch),
            "desired_acc": job.config.run.desired_acc,
            "top1": progress.best_top1,
            "time_seconds": progress.seconds,
            "unix_time": time.time(),
        }
    )


def describe(config: TrainConfig, progress: Progress, steps_per_epoch: int) -> list[str]:
    """Return one line on whether and when --desired-acc was reached; no line without the flag."""
    desired = config.run.desired_acc
    if desired is None:
        return []
    best, step = f"{100 * progress.best_top1:.2f} %", progress.best_step
    where = f"top-1 {best} after epoch {_epoch(step, steps_per_epoch)}, step {step:,}"
    if not is_reached(config, progress):
        return [f"desired accuracy {100 * desired:.2f} % not reached: the best is {where}"]
    took = f", {_duration(progress.seconds)}" if step == progress.step else ""  # unknown for earlier steps
    return [f"desired accuracy {100 * desired:.2f} % reached: {where}{took}"]


def _epoch(step: int, steps_per_epoch: int) -> int:
    return -(-step // steps_per_epoch)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    rough = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
    return f"{rough if minutes else f'{seconds:.1f} s'} of training ({timedelta(seconds=round(seconds))})"
