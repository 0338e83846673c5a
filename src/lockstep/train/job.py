"""All parts of one worker's training run, in groups, so that functions take only what they use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import Batch
from lockstep.run.balance import Balance
from lockstep.run.session import Session
from lockstep.train.callbacks import Hooks
from lockstep.train.custom import CustomSchedule
from lockstep.train.history import EpochRecords
from lockstep.train.inputs import Loading
from lockstep.train.metrics import Criterion, Measures, Meter
from lockstep.train.optim.ema import NoAverage
from lockstep.train.optim.schedule import Batching, Schedule
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.train.strategies import Strategy
from lockstep.train.worker_times import WorkerTimes
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World


@dataclass(frozen=True)
class Network:
    """The model and the modules derived from it.

    Args:
        model: The model, in the precision of the forward pass.
        weights: The module that the optimizer updates and checkpoints store: the model, or its float32 copy in O2.
        replica: The module that training calls: the model, compiled and wrapped by the strategy.
        frozen_norms: Batch norms whose statistics are frozen.
    """

    model: nn.Module
    weights: nn.Module
    replica: nn.Module
    frozen_norms: tuple[nn.Module, ...] = ()

    @cached_property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the model."""
        return tuple(self.model.parameters())

    def train(self) -> None:
        """Put the replica into training mode, except for frozen batch norms."""
        self.replica.train()
        for norm in self.frozen_norms:
            norm.eval()


@dataclass(frozen=True)
class Optimization:
    """The loss, the optimizer and everything between them.

    Args:
        criterion: Loss per sample: (logits [N, K], labels [N]), or other outputs and targets, to [N].
        kept: Keys of the optimizer's groups whose values a resume does not restore; None: all.
    """

    criterion: Criterion
    precision: Precision
    strategy: Strategy
    optimizer: Optimizer
    schedule: Schedule | CustomSchedule
    batching: Batching
    average: NoAverage
    kept: Collection[str] | None


class Guard:
    """Checks nothing: for fp16, where the loss scaler does; `lockstep.train.guards.nonfinite` has the others."""

    def begin(self, job: Job) -> None:
        """Called before the forward pass of each step."""

    def allows(self, job: Job, passes: Sequence[Batch]) -> bool:
        """Return whether the optimizer may take the step with these passes, whose gradients are complete.

        Raises:
            NonFiniteLossError: Training must stop; raised on all workers.
        """
        return True

    def report(self, job: Job) -> None:
        """Called with each report, before its values are checked.

        Raises:
            NonFiniteLossError: A step since the last report had a NaN or infinite gradient; raised on all workers.
        """


@dataclass(frozen=True)
class Job:
    """All parts of one worker's training run.

    `eval_criterion` is the loss of evaluations, without label smoothing. `notes` and `warnings` are lines to print.
    """

    config: TrainConfig
    world: World
    session: Session[Progress]
    network: Network
    loading: Loading
    optim: Optimization
    eval_criterion: Criterion
    measures: Measures
    meter: Meter
    clock: StepClock
    worker_times: WorkerTimes
    balance: Balance | None
    guard: Guard
    notes: list[str]
    warnings: list[str]
    epochs: EpochRecords
    hooks: Hooks

    @property
    def progress(self) -> Progress:
        return self.session.progress

    @property
    def steps_per_epoch(self) -> int:
        return self.loading.train_loader.sharding.steps_per_epoch

    @property
    def has_classes(self) -> bool:
        return bool(self.loading.data.classes)

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        planned = self.config.epochs * self.steps_per_epoch
        return min(planned, self.config.max_steps or planned, self.hooks.last_step)

    def close(self) -> None:
        """Close the session, readers and the strategy."""
        readers = self.loading.train_loader.reader, self.loading.val_loader.reader
        with ExitStack() as stack:  # closes in reverse order, each even if another fails
            for closing in (self.optim.strategy, *readers, self.session):
                stack.callback(closing.close)
