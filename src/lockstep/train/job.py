"""All parts of one worker's training run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data.loaders import EvalLoader, TrainLoader
from lockstep.data.sets import ImageData
from lockstep.train.checkpoints.checkpoint_folder import Checkpoints, newest
from lockstep.train.checkpoints.snapshot import HostCopies
from lockstep.train.guards.base import Guard
from lockstep.train.guards.replica_check import ReplicaCheck
from lockstep.train.losses import Criterion
from lockstep.train.metrics import Meter
from lockstep.train.monitoring.data_wait import DataWait
from lockstep.train.monitoring.step_clock import StepClock
from lockstep.train.optim.batch_plan import Batching
from lockstep.train.optim.ema import NoAverage
from lockstep.train.optim.schedule import Schedule
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.train.run_folder import RunFolder, logger
from lockstep.train.stopping.stop_requests import Stopping
from lockstep.train.strategies import Strategy
from lockstep.train.trackers import Tracker
from lockstep.world.world import World


@dataclass(frozen=True)
class Job:
    """All parts of one worker's training run.

    `model` computes; `replica` is what training calls: the same, compiled and wrapped by the strategy. `weights` is
    what the optimizer changes and checkpoints hold: the model, or its float32 copy where it computes in fp16.
    `criterion` gives one loss a sample: (logits [N, K], labels [N]) to [N]. `notes` are lines for people.
    """

    config: TrainConfig
    world: World
    data: ImageData
    model: nn.Module
    weights: nn.Module
    replica: nn.Module
    average: NoAverage
    criterion: Criterion
    optimizer: Optimizer
    schedule: Schedule
    batching: Batching
    strategy: Strategy
    precision: Precision
    train_loader: TrainLoader
    val_loader: EvalLoader
    data_wait: DataWait
    meter: Meter
    folder: RunFolder
    checkpoints: Checkpoints
    snapshots: Checkpoints
    tracker: Tracker
    progress: Progress
    stopping: Stopping
    replicas: ReplicaCheck
    guard: Guard
    identity: dict[str, Any]
    notes: list[str]
    copies: HostCopies
    clock: StepClock = field(default_factory=StepClock)

    @property
    def steps_per_epoch(self) -> int:
        return self.train_loader.sharding.steps_per_epoch

    @property
    def last_step(self) -> int:
        """The step after which the run ends."""
        planned = self.config.epochs * self.steps_per_epoch
        return min(planned, self.config.max_steps or planned)

    def about(self) -> dict[str, Any]:
        """What one must know to use the weights."""
        return {
            "arch": self.config.model.arch,
            "classes": list(self.data.classes),
            "input": asdict(self.data.input),
            "data": self.config.data.source,
        }

    def say(self, lines: Sequence[str]) -> None:
        """Tell people, and every worker's own log."""
        for line in lines:
            self.tracker.say(line)
            logger.info(line)

    def advice(self) -> str:
        """What to do when training has gone out of bounds."""
        good = newest(self.folder.checkpoints) or "none yet"
        return f"The last good checkpoint: {good}. Lower --lr, lengthen --warmup-epochs or add --clip-norm 1"

    def close(self) -> None:
        """End what the job started."""
        parts = (self.strategy, self.train_loader.reader, self.val_loader.reader)
        with ExitStack() as stack:  # each, even if another's fails
            for closing in (*parts, self.tracker, self.snapshots, self.checkpoints):  # from the last to the first
                stack.callback(closing.close)
