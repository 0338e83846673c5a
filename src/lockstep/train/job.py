"""All parts of one worker's training run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.config.schema import TrainConfig
from lockstep.files.untrusted import printable
from lockstep.train.callbacks import Hooks
from lockstep.train.checkpoints.checkpoint_folder import newest
from lockstep.train.guards.checks import ReplicaCheck
from lockstep.train.guards.nonfinite import Guard
from lockstep.train.guards.stopping import Stopping
from lockstep.train.job_parts import Evaluating, Loading, Network, Optimization, Saving
from lockstep.train.metrics import Meter
from lockstep.train.monitoring.history import EpochRecords
from lockstep.train.monitoring.worker_times import ReportInterval, WorkerTimes
from lockstep.train.progress import Progress
from lockstep.train.run_folder import logger
from lockstep.train.trackers import INFO, Tracker
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World


@dataclass(frozen=True)
class Job:
    """All parts of one worker's training run; `notes` and `warnings` are lines to print."""

    config: TrainConfig
    world: World
    network: Network
    loading: Loading
    optim: Optimization
    evaluating: Evaluating
    saving: Saving
    meter: Meter
    clock: StepClock
    interval: ReportInterval
    worker_times: WorkerTimes
    tracker: Tracker
    progress: Progress
    stopping: Stopping
    replicas: ReplicaCheck
    guard: Guard
    notes: list[str]
    warnings: list[str]
    epochs: EpochRecords
    hooks: Hooks

    @property
    def steps_per_epoch(self) -> int:
        return self.loading.train_loader.sharding.steps_per_epoch

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        planned = self.config.epochs * self.steps_per_epoch
        return min(planned, self.config.max_steps or planned, self.hooks.last_step)

    def about(self) -> dict[str, Any]:
        """Return the metadata needed to use the weights."""
        return {
            "arch": self.config.model.arch,
            "classes": list(self.loading.data.classes),
            "input": asdict(self.loading.data.input),
            "data": self.config.data.source,
        }

    def say(self, lines: Sequence[str], level: int = INFO) -> None:
        """Print lines on rank 0 if the level is enabled, and log them on every worker."""
        for line in lines:
            shown = printable(line)  # names of files and classes are untrusted
            self.tracker.say(shown, level)
            logger.info(shown)

    def advice(self) -> str:
        """Return advice for when training diverges."""
        good = newest(self.saving.folder.checkpoints) or "none yet"
        return f"The last good checkpoint: {good}. Lower --lr, lengthen --warmup-epochs or add --clip-norm 1"

    def close(self) -> None:
        """Close readers, trackers, checkpoint writers and the strategy."""
        readers = self.loading.train_loader.reader, self.loading.val_loader.reader
        writers = self.tracker, self.saving.snapshots, self.saving.checkpoints
        with ExitStack() as stack:  # closes in reverse order, each even if another fails
            for closing in (self.optim.strategy, *readers, *writers):
                stack.callback(closing.close)
