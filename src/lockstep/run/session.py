"""A job's part of a run, whether the trainer's loop takes its steps or a user's own: records, checkpoints and stops."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lockstep.config.mapping import to_mapping
from lockstep.errors import CheckpointError, StoppedError, plural
from lockstep.files.untrusted import printable
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.run.checkpoints.checkpoint_folder import Checkpoints
from lockstep.run.checkpoints.memory_snapshots import NONE
from lockstep.run.checkpoints.snapshot import HostCopies, Snapshot, Tensors
from lockstep.run.kept_run import KeptRun
from lockstep.run.position import Position
from lockstep.run.records.run_folder import HeldRun, RunFolder, logger
from lockstep.run.records.trackers import ALWAYS, DETAIL, INFO, Record, Tracker
from lockstep.run.stopping import Stopping, agreed_time_left, hosts_changed
from lockstep.world.generations import HostsChangedError
from lockstep.world.world import World

P = TypeVar("P", bound=Position)


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
class Session(Generic[P]):
    """A job's part of a run, from a start or resume on.

    Args:
        held: The run folder, locked by this job.
        before: Another run folder that the run was resumed from.
        identity: Settings that must be equal in a checkpoint and in a job that resumes from it.
        how_to_resume: What a user does to resume the run.
        copies: Copies the state to the host before it is written.
        kept: What this worker keeps of the run if another is lost.
    """

    world: World
    held: HeldRun
    before: RunFolder | None
    identity: dict[str, Any]
    how_to_resume: str
    progress: P
    trackers: list[Tracker]
    checkpoints: Checkpoints
    snapshots: Checkpoints
    copies: HostCopies
    stopping: Stopping
    kept: KeptRun
    _unrecorded: list[int | None] = field(default_factory=list)  # the repeated steps after a loss, until a step

    @property
    def folder(self) -> RunFolder:
        return self.held.folder

    def begin(self, time_limit: str | None) -> list[str]:
        """Measure and report the writes, and limit the time. Return lines to print. Collective."""
        for folder in (self.checkpoints, self.snapshots):
            folder.report_to(lambda line: self.say([line], ALWAYS), self.stopping.writing)
        left = agreed_time_left(time_limit, self.world)
        if left is None:
            return []
        self.stopping.end_within(left)
        return [left.describe()]

    def say(self, lines: Sequence[str], level: int = INFO) -> None:
        """Print lines on rank 0 if the level is enabled, and log them on every worker."""
        for line in lines:
            shown = printable(line)  # names of files and classes are untrusted
            for tracker in self.trackers:
                tracker.say(shown, level)
            logger.info(shown)

    def record(self, kind: str, **fields: Any) -> Record:
        """Store a record of now, and return it."""
        step, seconds = self.progress.step, self.progress.seconds
        record = {"kind": kind, "step": step, "time_seconds": seconds, "unix_time": time.time(), **fields}
        for tracker in self.trackers:
            tracker.record(record)
        return record

    def save(
        self, model: Tensors, states: Mapping[str, Any], about: Mapping[str, Any], is_best: bool, durably: bool
    ) -> None:
        """Copy the state, and write it in the background. The device may still be copying: see `HostCopies.protect`.

        Args:
            about: The description of the model.
            durably: True: a checkpoint on disk; False: a snapshot in this host's memory.
        """
        progress, copies = self.progress, self.copies

        def copy() -> Snapshot:
            with copies.making() as wait:
                copied = copies.copy(model), copies.copy(states)
                return Snapshot(progress.step, *copied, to_mapping(progress), about, self.identity, wait)

        (self.checkpoints if durably else self.snapshots).save(copy, is_best)
        noun = "checkpoint" if durably else "snapshot"
        for tracker in self.trackers:
            tracker.say(f"writing the {noun} of step {progress.step:,} in the background", DETAIL)

    def begin_generation(self) -> None:
        """Prepare to record how the job continued after a loss, and how many steps it repeats. Collective.

        If all workers were started again, that number is unknown.
        """
        reached = max(self.world.gather(self.kept.reached))
        self._unrecorded.append(max(0, reached - self.progress.step) if reached else None)

    def note_step(self) -> None:
        """Note that a step is complete; record it if it is the first after a loss."""
        self.kept.reached = self.progress.step
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
        problems, exported_step = list[str](), -1
        try:
            self.checkpoints.wait()
        except CheckpointError as error:
            problems.append(str(error))
        newest = checkpoint_folder.newest(self.folder.checkpoints) if self.world.is_main else None
        try:
            if export and newest:
                exported_step = self.checkpoints.export_best(self.folder.model)
        except CheckpointError as error:
            problems.append(str(error))
        problems += [problem for tracker in self.trackers for problem in tracker.unwritten()]
        if problems:
            next_step = f"; {self.how_to_resume}" if newest else " and start again: there is nothing to resume"
            problems[-1] += f". Free disk space{next_step}"
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
        return StoppedError(f"{event}{of_all}, with a checkpoint, {written.checkpoint}; {self.how_to_resume}")

    def close(self) -> None:
        """Close the trackers, and wait for what is being written."""
        with ExitStack() as stack:  # closes in reverse order, each even if another fails
            stack.callback(self.trackers.clear)
            for close in (*(tracker.close for tracker in self.trackers), self.snapshots.close, self.checkpoints.close):
                stack.callback(close)


def divides(every: int, count: int) -> bool:
    """Return whether an action due every `every` counts (0: never) is due at `count`."""
    return every > 0 and count > 0 and count % every == 0
