"""Save a job's state as checkpoints and snapshots, during training and at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.config.run_paths import how_to_resume
from lockstep.diagnosis import publisher
from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.checkpoints.snapshot import Snapshot
from lockstep.train.custom import check_savable
from lockstep.train.guards.nonfinite import are_finite
from lockstep.train.job import Job, Saving
from lockstep.train.optim.build import stepping
from lockstep.train.trackers import DETAIL, Tracker
from lockstep.world.world import World


def take_snapshot(job: Job) -> Snapshot:
    """Return a copy of the job's state after its last step.

    If the strategy gathers state, call its `gather_state` on all workers first, and then this only on rank 0.
    """
    copies = job.saving.copies
    weights = job.network.weights.state_dict()
    # The next forward pass changes buffers; the rest changes only in the optimizer step, after `copies.protect()`.
    buffers = copies.steady({name: tensor for name, tensor in job.network.weights.named_buffers() if name in weights})
    with copies.making() as wait:
        return Snapshot(
            step=job.progress.step,
            model=copies.copy({**weights, **buffers}),
            average=copies.copy(job.optim.average.state_dict()),
            optimizer=copies.copy(job.optim.optimizer.state_dict()),
            strategy=copies.copy(job.optim.strategy.state_dict()),
            precision=copies.copy({"name": job.optim.precision.name, **job.optim.precision.state_dict()}),
            progress=job.progress.to_mapping(),
            about=job.about(),
            job=job.saving.identity,
            wait=wait,
        )


def prepare_snapshot(job: Job) -> Callable[[], Snapshot]:
    """Check the state and return a function that takes its snapshot. Call it on all workers.

    Raises:
        ReplicasDifferError: The workers' weights differ; raised on all workers.
        NonFiniteLossError: Weights are NaN or infinite; raised on all workers.
        RewindError: Raised instead with --on-nan rewind.
        ConfigError: The optimizer's state cannot be stored in a checkpoint.
    """
    job.replicas.check(job.progress.step)  # first: a NaN on one worker only is a fault of that worker
    if not are_finite(job.world, job.network.weights):
        step = job.progress.step
        job.guard.refuse_weights(
            job, step, f"the weights are NaN or infinite after step {step}; no checkpoint was written"
        )
    if job.optim.kept is not None:  # a custom optimizer
        check_savable(stepping(job.optim.optimizer))
    job.optim.strategy.gather_state(job.optim.optimizer)
    return partial(take_snapshot, job)


def save(job: Job, is_best: bool = False, durably: bool = True) -> None:
    """Write a checkpoint in the background.

    Args:
        durably: True: a checkpoint on disk; False: a snapshot in this host's memory.

    Raises:
        ReplicasDifferError, NonFiniteLossError, RewindError, ConfigError: As for `prepare_snapshot`.
    """
    publisher.report("checkpoint")
    if not durably and job.world.size > job.world.rank_info.local_size:  # each host writes its own snapshot
        job.optim.strategy.broadcast([*job.network.weights.buffers(), *job.optim.average.model.buffers()])
    (job.saving.checkpoints if durably else job.saving.snapshots).save(prepare_snapshot(job), is_best)
    noun = "checkpoint" if durably else "snapshot"
    job.tracker.say(f"writing the {noun} of step {job.progress.step:,} in the background", DETAIL)
    if durably:
        job.hooks.saved(job.saving.checkpoints, job.saving.folder.checkpoints)


@dataclass(frozen=True)
class Written:
    """The files written by the end of a session, equal on all workers.

    Args:
        problem: What could not be written, and how to fix it; "" if all was written.
        checkpoint: The newest checkpoint; "" if there is none.
        exported_step: The step of the exported weights; -1 if none were exported.
    """

    problem: str
    checkpoint: str
    exported_step: int


def finish_saving(saving: Saving, tracker: Tracker, world: World, export: bool = False, resume: str = "") -> Written:
    """Wait until everything is written; with `export`, also export the best weights. Collective.

    Args:
        resume: How to resume; "": by the flags of `lockstep train`.
    """
    problems, exported_step = list[str](), -1
    try:
        saving.checkpoints.wait()
    except CheckpointError as error:
        problems.append(str(error))
    newest = checkpoint_folder.newest(saving.folder.checkpoints) if world.is_main else None
    try:
        if export and newest:
            exported_step = saving.checkpoints.export_best(saving.folder.model)
    except CheckpointError as error:
        problems.append(str(error))
    problems += tracker.unwritten()
    if problems:
        resume = resume or how_to_resume(saving.folder.path, world.rank_info.launcher != "none")
        next_step = f"; {resume}" if newest else " and start again: there is nothing to resume"
        problems[-1] += f". Free disk space{next_step}"
    return Written(*world.from_main(["; ".join(problems), str(newest or ""), exported_step]))
