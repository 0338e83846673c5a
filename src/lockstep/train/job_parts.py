"""The parts of a job that belong together, so that functions take what they use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.data.loaders import EvalLoader, TrainLoader
from lockstep.data.sets import ImageData
from lockstep.train.checkpoints.checkpoint_folder import Checkpoints
from lockstep.train.checkpoints.run_lock import HeldRun
from lockstep.train.checkpoints.snapshot import HostCopies
from lockstep.train.custom.measures import Measures
from lockstep.train.losses import Criterion
from lockstep.train.monitoring.data_wait import DataWait
from lockstep.train.optim.batch_plan import Batching
from lockstep.train.optim.ema import NoAverage
from lockstep.train.optim.schedule import Rates
from lockstep.train.precision import Precision
from lockstep.train.run_folder import RunFolder
from lockstep.train.strategies import Strategy


@dataclass(frozen=True)
class Network:
    """The model in its forms.

    Args:
        model: It computes.
        weights: What the optimizer changes and checkpoints hold: the model, or its float32 copy where it computes in
            fp16.
        replica: What training calls: the model, compiled and wrapped by the strategy.
        frozen_norms: Batch norms of the model whose statistics stay as they are.
    """

    model: nn.Module
    weights: nn.Module
    replica: nn.Module
    frozen_norms: tuple[nn.Module, ...] = ()

    def train(self) -> None:
        """Put the replica into training mode, but for what is frozen."""
        self.replica.train()
        for norm in self.frozen_norms:
            norm.eval()


@dataclass(frozen=True)
class Loading:
    """The data, and how batches of it come."""

    data: ImageData
    train_loader: TrainLoader
    val_loader: EvalLoader
    data_wait: DataWait


@dataclass(frozen=True)
class Optimization:
    """From a loss to other weights.

    Args:
        criterion: One loss a sample: (logits [N, K], labels [N]) to [N].
        average: The moving average of the weights.
        kept: Of the values in the optimizer's groups, those that no checkpoint replaces; None: all.
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
    """What evaluations compute.

    Args:
        criterion: One loss a sample, as in training but without label smoothing.
    """

    criterion: Criterion
    measures: Measures


@dataclass(frozen=True)
class Saving:
    """What outlives the workers, and where it is.

    Args:
        held: The run's folder, which this job holds.
        identity: What a checkpoint must have in common with a job that goes on from it.
        copies: Where the state is copied to before it is written.
    """

    held: HeldRun
    checkpoints: Checkpoints
    snapshots: Checkpoints
    identity: dict[str, Any]
    copies: HostCopies

    @property
    def folder(self) -> RunFolder:
        return self.held.folder
