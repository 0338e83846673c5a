"""What a job saves: snapshots of its state, to its checkpoints, while it trains and at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lockstep.config.resume_command import how_to_resume
from lockstep.errors import CheckpointError
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.checkpoints.snapshot import Snapshot
from lockstep.train.custom.custom_optimizer import check_savable
from lockstep.train.guards.finite_weights import are_finite
from lockstep.train.job import Job
from lockstep.train.job_parts import Saving
from lockstep.train.optim.build import stepping
from lockstep.train.trackers import DETAIL, Tracker
from lockstep.world.world import World


def take_snapshot(job: Job) -> Snapshot:
    """The job's state after its last step, on rank 0 after `gather_state`; training on changes nothing of it."""
    copies = job.saving.copies
    weights = job.network.weights.state_dict()
    # The next forward pass changes these already; all else is changed by the step, before which copies are protected.
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
    """On all workers: what gives, on those that write it, a snapshot of the state as it is.

    Raises:
        ReplicasDifferError: The workers' weights are not equal; raised on all workers.
        NonFiniteLossError: A worker's weights are not numbers any more; likewise.
        RewindError: Instead, where training may go back.
        ConfigError: The optimizer keeps what no checkpoint can hold.
    """
    job.replicas.check(job.progress.step)  # first: a NaN on one worker alone is its fault, and not the training's
    if not are_finite(job.world, job.network.weights):
        step = job.progress.step
        job.guard.refuse_weights(
            job, step, f"the weights are NaN or infinite after step {step}; no checkpoint was written"
        )
    if job.optim.kept is not None:  # an optimizer of the caller's
        check_savable(stepping(job.optim.optimizer))
    job.optim.strategy.gather_state(job.optim.optimizer)
    return partial(take_snapshot, job)


def save(job: Job, is_best: bool = False, durably: bool = True) -> None:
    """Write a checkpoint in the background, unless the weights are not numbers any more.

    Args:
        durably: To the disk; False: a snapshot, to this host's memory.

    Raises:
        NonFiniteLossError: They are not; raised on all workers.
    """
    if not durably and job.world.size > job.world.place.local_size:  # each host keeps a copy of its own
        job.optim.strategy.broadcast([*job.network.weights.buffers(), *job.optim.average.model.buffers()])
    (job.saving.checkpoints if durably else job.saving.snapshots).save(prepare_snapshot(job), is_best)
    noun = "checkpoint" if durably else "snapshot"
    job.tracker.say(f"writing the {noun} of step {job.progress.step:,} in the background", DETAIL)
    if durably:
        job.hooks.saved(job.saving)


@dataclass(frozen=True)
class Written:
    """What is on the disk at the end of a session, the same on all workers.

    Args:
        problem: What could not be written, and what to do about it; "" where everything was.
        checkpoint: The newest checkpoint; "" where there is none.
        exported_step: Of the weights that were exported; -1 where none were.
    """

    problem: str
    checkpoint: str
    exported_step: int


def finish_saving(saving: Saving, tracker: Tracker, world: World, export: bool = False) -> Written:
    """Wait until everything is written; `export`: and write the best weights for use."""
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
        resume = how_to_resume(saving.folder.path, world.place.launcher != "none")
        next_step = f"; {resume}" if newest else " and start again: there is nothing to resume"
        problems[-1] += f". Free disk space{next_step}"
    return Written(*world.from_main(["; ".join(problems), str(newest or ""), exported_step]))
