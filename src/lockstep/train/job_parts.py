"""Groups of related parts of a job, so that functions take only what they use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.data.loaders import EvalLoader, TrainLoader
from lockstep.data.sets import ImageData
from lockstep.train.checkpoints.checkpoint_folder import Checkpoints
from lockstep.train.checkpoints.run_lock import HeldRun
from lockstep.train.checkpoints.snapshot import HostCopies
from lockstep.train.losses import Criterion
from lockstep.train.metrics import Measures
from lockstep.train.monitoring.data_wait import DataWait
from lockstep.train.optim.batch_plan import Batching
from lockstep.train.optim.ema import NoAverage
from lockstep.train.optim.schedule import Rates
from lockstep.train.precision import Precision
from lockstep.train.run_folder import RunFolder
from lockstep.train.strategies import Strategy


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
class Loading:
    """The data and its loaders."""

    data: ImageData
    train_loader: TrainLoader
    val_loader: EvalLoader
    data_wait: DataWait


@dataclass(frozen=True)
class Optimization:
    """The loss, the optimizer and everything between them.

    Args:
        criterion: Loss per sample: (logits [N, K], labels [N]) to [N].
        average: The moving average of the weights.
        kept: Keys of the optimizer's groups whose values a resume does not restore; None: all.
    """

    criterion: Criterion
    precision: Precision
    strategy: Strategy
    optimizer: Optimizer
    schedule: Rates
    batching: Batching
    average: NoAverage
    kept: Collection[str] | None


@dataclass(frozen=True)
class Evaluating:
    """The loss and metrics of evaluations.

    Args:
        criterion: Loss per sample, as in training but without label smoothing.
    """

    criterion: Criterion
    measures: Measures


@dataclass(frozen=True)
class Saving:
    """Checkpoints, snapshots and the run folder.

    Args:
        held: The run folder, locked by this job.
        identity: Settings that must be equal in a checkpoint and in a job that resumes from it.
        copies: Copies the state to the host before it is written.
    """

    held: HeldRun
    checkpoints: Checkpoints
    snapshots: Checkpoints
    identity: dict[str, Any]
    copies: HostCopies

    @property
    def folder(self) -> RunFolder:
        return self.held.folder
