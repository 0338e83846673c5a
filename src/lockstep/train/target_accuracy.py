"""The accuracy that training is to reach: `--desired-acc` ends it after the evaluation that does."""

from __future__ import annotations

import time
from datetime import timedelta

from lockstep.train.job import Job


def is_reached(job: Job) -> bool:
    """Whether an evaluation of this run, also before a resume, has reached it; the same on all workers."""
    desired = job.config.run.desired_acc
    return desired is not None and job.progress.best_top1 >= desired


def report_reached(job: Job) -> None:
    """Record that the last evaluation has reached it."""
    progress = job.progress
    job.tracker.record(
        {
            "kind": "desired",
            "step": progress.step,
            "epoch": _epoch(job, progress.step),
            "desired_acc": job.config.run.desired_acc,
            "top1": progress.best_top1,
            "time_seconds": progress.seconds,
            "unix_time": time.time(),
        }
    )


def describe(job: Job) -> list[str]:
    """Whether it was reached, and when, in one line; none where no accuracy is desired."""
    progress, desired = job.progress, job.config.run.desired_acc
    if desired is None:
        return []
    best, step = f"{100 * progress.best_top1:.2f} %", progress.best_step
    where = f"top-1 {best} after epoch {_epoch(job, step)}, step {step:,}"
    if not is_reached(job):
        return [f"desired accuracy {100 * desired:.2f} % not reached: the best is {where}"]
    took = f", {_duration(progress.seconds)}" if step == progress.step else ""  # else it took less
    return [f"desired accuracy {100 * desired:.2f} % reached: {where}{took}"]


def _epoch(job: Job, step: int) -> int:
    return -(-step // job.steps_per_epoch)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    rough = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
    return f"{rough if minutes else f'{seconds:.1f} s'} of training ({timedelta(seconds=round(seconds))})"
