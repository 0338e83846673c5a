"""The base guard, which checks nothing: in fp16 the loss scaler checks gradients before the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data.sets import Batch
from lockstep.errors import NonFiniteLossError
from lockstep.train.job_parts import Loading, Network, Optimization
from lockstep.train.metrics import Meter
from lockstep.train.progress import Progress
from lockstep.world.world import World

MOST_SKIPPED_IN_A_ROW = 25  # by then a dynamic loss scale has dropped from 65,536 to 0.002


class Training(Protocol):
    """The guards' view of a job (`lockstep.train.job.Job`), which contains a guard."""

    @property
    def config(self) -> TrainConfig: ...
    @property
    def world(self) -> World: ...
    @property
    def loading(self) -> Loading: ...
    @property
    def steps_per_epoch(self) -> int: ...
    @property
    def network(self) -> Network: ...
    @property
    def optim(self) -> Optimization: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def progress(self) -> Progress: ...

    def say(self, lines: Sequence[str], level: int) -> None:
        """Print and log lines; the level is one of `lockstep.train.trackers`."""

    def advice(self) -> str:
        """Return advice for when training diverges."""


class RewindError(Exception):
    """Training must restore an earlier state, and then skip the update of `step`."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


class Guard:
    """Checks nothing: for fp16, where the loss scaler does."""

    def begin_step(self, job: Training) -> None:
        """Called before a step's first forward pass."""

    def norm(self, optimizer: Optimizer, of_order_two: bool) -> torch.Tensor | None:
        """Examine the complete gradients. Return their L2 norm if `of_order_two`."""
        return None

    def allows(self, job: Training, passes: Sequence[Batch]) -> bool:
        """Return whether the optimizer may take the step with these passes.

        Raises:
            NonFiniteLossError: Training must stop; raised on all workers.
        """
        return True

    def report(self, job: Training) -> None:
        """Called with each report, before its values are checked.

        Raises:
            NonFiniteLossError: A step since the last report had a NaN or infinite gradient; raised on all workers.
            RewindError: The same, with --on-nan rewind.
        """

    def refuse_weights(self, job: Training, after: int, why: str) -> None:
        """Raise an error because weights are NaN or infinite after step `after`.

        Raises:
            NonFiniteLossError: On all workers.
            RewindError: Instead, with --on-nan rewind.
        """
        raise NonFiniteLossError(f"{why}. {job.advice()}")
