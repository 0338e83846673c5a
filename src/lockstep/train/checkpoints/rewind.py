"""Restore an earlier state within the process, on all workers, and repeat the steps since then.

Loader, augmentation and dropout depend only on (seed, epoch, step), so the repeated steps are identical. Their records
are removed first, so each appears once.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lockstep.errors import CheckpointError, NonFiniteLossError
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.checkpoints.memory_snapshots import NONE, bring_newest
from lockstep.train.checkpoints.resume import ResumePoint, restore
from lockstep.train.guards.nonfinite import RewindError
from lockstep.train.job import Job
from lockstep.train.job_parts import Saving
from lockstep.train.trackers import ALWAYS
from lockstep.world.world import World


def newest_good(saving: Saving, world: World) -> Path | None:
    """Return the newest snapshot or checkpoint of this run, equal on every worker; None if there is none yet."""
    for folder in (saving.checkpoints, saving.snapshots):
        with suppress(CheckpointError):  # if the last one was not written, use the one before
            folder.wait()
    found = checkpoint_folder.newest(saving.folder.checkpoints) if world.is_main else None
    path = world.from_main(str(found) if found else None)
    good, memory = Path(path) if path else None, world.rank_info.snapshots
    snapshot = bring_newest(memory, world, checkpoint_folder.step_of(good) if good else NONE) if memory else None
    return snapshot or good


def rewind(job: Job, trouble: RewindError) -> None:
    """Restore the newest good state. Call it on all workers.

    Raises:
        NonFiniteLossError: There is no state from before the bad step; raised on all workers.
        CheckpointError: The checkpoint is damaged.
    """
    path, reached = newest_good(job.saving, job.world), job.progress.step
    if path is None:
        raise NonFiniteLossError(
            f"{trouble}; --on-nan rewind has no checkpoint to go back to yet: add --checkpoint-steps N, or use "
            f"--on-nan skip"
        )
    job.optim.strategy.forget_gradients()
    job.network.model.zero_grad()
    progress = restore(ResumePoint(path), job.saving.identity, job.network.weights, job.optim)
    job.meter.forget()
    job.interval.restart()
    job.worker_times.forget()
    job.replicas.forget()
    if progress.step >= trouble.step:
        raise NonFiniteLossError(f"{trouble}; the newest checkpoint, {path}, is not older than that step")
    checkpoint_folder.go_back(job.saving.checkpoints, progress, job.world)
    job.saving.snapshots.forget_after(progress.step, NONE)
    job.progress.become(progress)
    job.tracker.rewind(progress.step, in_epoch=progress.epoch_totals.count > 0)
    job.say(
        [
            f"{trouble}; rewinding from step {reached} to {path.name}, to repeat the steps since then without the "
            f"update of step {trouble.step}"
        ],
        ALWAYS,
    )
