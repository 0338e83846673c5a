"""A job's part of a run, whether the trainer's loop takes its steps or a user's own: records, checkpoints and stops.

A step is complete when `complete_step` was called. What is then `due` is written by `save`, after checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from lockstep.config.mapping import to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.diagnosis import publisher
from lockstep.diagnosis.oversubscription import BusyCores
from lockstep.errors import CheckpointError, NonFiniteLossError, StoppedError, plural
from lockstep.files.untrusted import printable_name
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.run.checkpoints.checkpoint_folder import Checkpoints
from lockstep.run.checkpoints.memory_snapshots import NONE, WRITER, snapshot_interval
from lockstep.run.checkpoints.snapshot import HostCopies, Snapshot
from lockstep.run.named_states import LoopChanges, gather_states, is_sharded, unwrapped
from lockstep.run.position import Position
from lockstep.run.records.job_energy import JobEnergy
from lockstep.run.records.run_folder import RunFolder, logger
from lockstep.run.records.trackers import ALWAYS, DETAIL, INFO, Record, Tracker
from lockstep.run.replicas import ReplicaCheck, are_finite
from lockstep.run.stopping import Stopping, agreed_time_left, hosts_changed
from lockstep.world import accelerator
from lockstep.world.generations import HostsChangedError
from lockstep.world.world import World

P = TypeVar("P", bound=Position)
reached: dict[Path, int] = {}
"""By run folder, the newest complete step of this process: after a loss, it tells how many steps are repeated."""


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

    def check(self, event: str) -> None:
        """Raise CheckpointError, which names the event, if something could not be written."""
        if self.problem:
            raise CheckpointError(f"{event}, but {self.problem}")


@dataclass(frozen=True)
class RunDescription:
    """What a run is, and what its checkpoints store.

    Args:
        identity: Settings that must be equal in a checkpoint and in a job that resumes from it.
        states: By their names in checkpoints, in the order in which they are restored after models.
        how_to_resume: What a user does to resume the run.
        about: The description of the model.
        build_console: Builds the tracker that prints lines.
        advice: Added to what is said on weights that are not finite.
        has_recipe: Whether the configuration describes the whole run, so that the folder keeps it.
        gathers_state: Whether only rank 0 has the whole state when it is saved.
        is_sharded: Whether each worker writes its parts of the state.
        differs_by_host: Whether snapshots of several hosts, each of one worker's state, may differ.
        protects_late: Whether the states, but for buffers, change only after `HostCopies.protect`; else, at once.
    """

    identity: dict[str, Any]
    states: Mapping[str, Any]
    how_to_resume: str
    about: Mapping[str, Any]
    build_console: Callable[[], Tracker]
    advice: str = ""
    has_recipe: bool = True
    gathers_state: bool = True
    is_sharded: bool = False
    differs_by_host: bool = False
    protects_late: bool = False
    changes: LoopChanges = field(default_factory=lambda: LoopChanges({}))

    @property
    def models(self) -> list[nn.Module]:
        return [unwrapped(each) for each in self.states.values() if isinstance(each, nn.Module)]


@dataclass
class Session(Generic[P]):
    """A job's part of a run, from a start or resume on.

    Args:
        folder: The run folder, locked by this job.
        copies: Copies the state to the host before it is written.
    """

    config: TrainConfig
    world: World
    folder: RunFolder
    described: RunDescription
    progress: P
    trackers: list[Tracker]
    checkpoints: Checkpoints
    snapshots: Checkpoints
    copies: HostCopies
    stopping: Stopping
    energy: JobEnergy | None = field(default=None, init=False)
    _busy_cores: BusyCores = field(default_factory=BusyCores, init=False)
    _unrecorded: list[int | None] = field(default_factory=list)  # the repeated steps after a loss, until a step
    _saved: tuple[tuple[int, ...], bool] = ((), False)  # the newest state's place, and whether it is on disk

    def __post_init__(self) -> None:
        every, models = self.config.parallel.check_replicas, self.described.models
        self._place = self.folder.path.absolute()
        self._snapshot_steps = snapshot_interval(self.config, self.world)
        self._replicas = [ReplicaCheck(self.world, each, every) for each in models if not is_sharded(each)]

    def newest(self) -> Path | None:
        """Return the newest checkpoint of the run; None if there is none."""
        return checkpoint_folder.newest(self.folder.checkpoints)

    def begin(self) -> list[str]:
        """Measure and report the writes, count the energy, and limit the time. Return lines to print. Collective."""
        self.energy = JobEnergy(self.world)
        for folder in (self.checkpoints, self.snapshots):
            folder.report_to(lambda line: self.say([line], ALWAYS), self.stopping.writing)
        left = agreed_time_left(self.config.run.time_limit, self.world)
        if left is None:
            return []
        self.stopping.end_within(left)
        return [left.describe()]

    def say(self, lines: Sequence[str], level: int = INFO) -> None:
        """Print lines on rank 0 if the level is enabled, and log them on every worker."""
        for line in lines:
            shown = printable_name(line)  # names of files and classes are untrusted
            for tracker in self.trackers:
                tracker.say(shown, level)
            logger.info(shown)

    def record(self, kind: str, **fields: Any) -> Record:
        """Store a record of now, and return it."""
        step, seconds = self.progress.step, self.progress.seconds
        busy = {"busy_cores": self._busy_cores.take()} if kind == "step" else {}
        record = {"kind": kind, "step": step, "time_seconds": seconds, "unix_time": time.time(), **fields, **busy}
        for tracker in self.trackers:
            tracker.record(record)
        return record

    def record_energy(self, samples: int = 0) -> float:
        """Record the energy since the last such record, of steps of so many samples. Return its joules. Collective."""
        if self.energy is None:
            return 0.0
        joules, unread = self.energy.take()
        if joules or unread:
            self.record("energy", joules=joules, samples=samples, unread=unread)
        return sum(joules.values())

    def due(self, stops: bool, is_last: bool = False) -> bool | None:
        """Return whether a checkpoint (True) or a snapshot in memory (False) is due here; None: neither, or written.

        Args:
            stops: Whether the run stops here.
            is_last: Whether an evaluation and its checkpoint follow.
        """
        step, (place, is_durable) = self.progress.step, self._saved
        durably = stops or (divides(self.config.run.checkpoint_steps, step) and not is_last)
        if place == self.progress.place and (is_durable or not durably):
            return None
        return durably if durably or divides(self._snapshot_steps, step) else None

    def check_replicas(self) -> None:
        """Compare the workers' weights if that is due after this step. Collective.

        Raises:
            ReplicasDifferError: They differ; raised on all workers.
        """
        for replicas in self._replicas:
            replicas.check_due(self.progress.step)

    def save(self, is_best: bool = False, durably: bool = True) -> None:
        """Check the states, copy them, and write them in the background. Collective.

        Args:
            is_best: Whether the states are the best so far.
            durably: True: a checkpoint on disk; False: a snapshot in this host's memory.

        Raises:
            ReplicasDifferError: The workers' weights differ; raised on all workers.
            NonFiniteLossError: Weights are NaN or infinite; raised on all workers.
            ConfigError: A state has a value that no checkpoint can store.
        """
        publisher.report("checkpoint")
        world, described, progress, copies = self.world, self.described, self.progress, self.copies
        for replicas in self._replicas:  # first: a NaN on one worker only is a fault of that worker
            replicas.check(progress.step)
        if not all(are_finite(world, each) for each in described.models):
            raise NonFiniteLossError(
                f"the weights are NaN or infinite after step {progress.step}; no checkpoint was written. "
                f"{self.advise()}"
            )
        if not described.models:  # else `are_finite` has waited: a step counts when it is complete on all devices
            accelerator.synchronize(world.device)
        writer = self.checkpoints if durably else self.snapshots
        hold = copies.steady if described.protects_late else dict
        model, states = gather_states(described.states, writer.stores_whole, described.is_sharded, hold)
        progress.best_step = progress.step if is_best else progress.best_step
        about = {WRITER: world.rank} if described.differs_by_host and not durably else described.about

        def copy() -> Snapshot:
            with copies.making() as wait:  # the device may still be copying
                copied = copies.copy(model), copies.copy(states)
                return Snapshot(progress.step, *copied, to_mapping(progress), about, dict(described.identity), wait)

        writer.save(copy, is_best or (durably and 0 < progress.step == progress.best_step))
        if not described.protects_late:
            copies.protect()
        self._saved = (progress.place, durably)
        for tracker in self.trackers:
            noun = "checkpoint" if durably else "snapshot"
            tracker.say(f"writing the {noun} of step {progress.step:,} in the background", DETAIL)
        publisher.report("running", progress.step)

    def advise(self) -> str:
        """Return advice for when training diverges."""
        return f"The last good checkpoint: {self.newest() or 'none yet'}{self.described.advice}"

    def begin_generation(self) -> None:
        """Prepare to record how the job continued after a loss, and how many steps it repeats. Collective.

        If all workers were started again, that number is unknown.
        """
        last = max(self.world.gather(reached.get(self._place, 0)))
        self._unrecorded.append(max(0, last - self.progress.step) if last else None)

    def complete_step(self) -> None:
        """Count a step; record it if it is the first after a loss."""
        self.progress.step += 1
        reached[self._place] = self.progress.step
        publisher.report("running", self.progress.step)
        if self._unrecorded:
            repeated, step, rank_info = self._unrecorded.pop(), self.progress.step, self.world.rank_info
            seconds = max(0.0, time.time() - rank_info.loss_time)
            self.record(
                "generation",
                workers=self.world.size,
                number=rank_info.restart,
                cause=rank_info.loss,
                seconds=seconds,
                **({} if repeated is None else {"repeated_steps": repeated}),
            )
            again = f"that was step {step:,}" if repeated is None else f"{plural(repeated, 'step')} repeated"
            self.say([f"{rank_info.loss}: the next step was complete after {seconds:.2f} s; {again}"])

    def go_back(self) -> None:
        """Remove what was saved after the restored step. Collective.

        The best evaluation is that of the best checkpoint: a better one's may be damaged, or was never written.
        """
        self.checkpoints.forget_after(self.progress.step, self.progress.best_step)
        self.snapshots.forget_after(self.progress.step, NONE)
        self.progress.take_best(self.world.from_main(self.checkpoints.best_progress()))

    def finish(self, export: bool = False) -> Written:
        """Wait until everything is written; with `export`, also export the best weights. Collective."""
        self.record_energy()
        problems, exported_step = list[str](), -1
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            problems.append(str(error))
        newest = self.newest() if self.world.is_main else None
        try:
            if export and newest:
                exported_step = self.checkpoints.export_best(self.folder.model)
        except CheckpointError as error:
            problems.append(str(error))
        problems += [problem for tracker in self.trackers for problem in tracker.unwritten()]
        if problems:
            fix = f"; {self.described.how_to_resume}" if newest else " and start again: there is nothing to resume"
            problems[-1] += f". Free disk space{fix}"
        written = Written(*self.world.from_main(["; ".join(problems), str(newest or ""), exported_step]))
        if not written.problem:  # else a restart needs the snapshots, which take memory until the job ends
            self.snapshots.close()
            self.snapshots.forget_after(NONE, NONE)
        return written

    def stop(self, last_step: int | None = None) -> StoppedError | HostsChangedError:
        """Wait for the checkpoint of a requested stop, and return the exception to raise. Collective.

        Raises:
            CheckpointError: The checkpoint could not be written; raised on all workers.
        """
        if hosts_changed(self.stopping, self.world):
            self.finish().check("the job's hosts have changed")
            return HostsChangedError()
        reason, of_all = self.stopping.reason, f" of {last_step:,}" if last_step else ""
        self.record("stop", reason=reason)
        written, event = self.finish(), f"stopped by {reason} after step {self.progress.step:,}"
        written.check(event)
        return StoppedError(f"{event}{of_all}, with a checkpoint, {written.checkpoint}; {self.described.how_to_resume}")

    def close(self) -> None:
        """Close the trackers, and wait for what is being written."""
        with ExitStack() as stack:  # closes in reverse order, each even if another fails
            stack.callback(self.trackers.clear)
            for close in (*(tracker.close for tracker in self.trackers), self.snapshots.close, self.checkpoints.close):
                stack.callback(close)
            if self.energy:
                stack.callback(self.energy.close)


def divides(every: int, count: int) -> bool:
    """Return whether an action due every `every` counts (0: never) is due at `count`."""
    return every > 0 and count > 0 and count % every == 0
