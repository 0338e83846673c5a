"""The custom parts of a run, in one object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.train.custom.callbacks import Callback
from lockstep.train.custom.custom_loss import Loss
from lockstep.train.custom.custom_optimizer import OptimizerFactory
from lockstep.train.custom.custom_schedule import SchedulerFactory
from lockstep.train.custom.measures import Metric


@dataclass(frozen=True)
class CustomParts:
    """User-defined parts that replace or extend the built-in ones.

    Args:
        measures_classes: Compute the confusion matrix in every evaluation.
    """

    loss: Loss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    optimizer: Optimizer | OptimizerFactory | None = None
    scheduler: LRScheduler | SchedulerFactory | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    measures_classes: bool = False
