"""What looks at a step's numbers before the update: here nothing, as in fp16, where the loss scaler does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.optim import Optimizer

from lockstep.config.schema import TrainConfig
from lockstep.data.batch import Batch
from lockstep.errors import NonFiniteLossError
from lockstep.train.job_parts import Loading, Network, Optimization
from lockstep.train.metrics import Meter
from lockstep.train.progress import Progress
from lockstep.world.world import World

MOST_SKIPPED_IN_A_ROW = 25  # from 65,536, a dynamic loss scale has then come down to 0.002


class Training(Protocol):
    """What guards see of a job (`lockstep.train.job.Job`), which holds one of them."""

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
        """What to do when training has gone out of bounds."""


class RewindError(Exception):
    """Training has to go back to a good state, and to leave out the update of a step then."""

    def __init__(self, step: int, why: str):
        super().__init__(why)
        self.step = step


class Guard:
    """Looks at nothing: in fp16, where the loss scaler does."""

    def begin_step(self, job: Training) -> None:
        """Before a step's first forward pass."""

    def norm(self, optimizer: Optimizer, of_order_two: bool) -> torch.Tensor | None:
        """See the complete gradients; returns their norm where that is one of order two."""
        return None

    def allows(self, job: Training, passes: Sequence[Batch]) -> bool:
        """Whether the optimizer may take the step, whose passes these were.

        Raises:
            NonFiniteLossError: It may not, nor may training go on; raised on all workers.
        """
        return True

    def report(self, job: Training) -> None:
        """With each report, before its figures are looked at.

        Raises:
            NonFiniteLossError: A step since the last report had such a gradient; raised on all workers.
            RewindError: Likewise.
        """

    def refuse_weights(self, job: Training, after: int, why: str) -> None:
        """The weights are no numbers any more after a step; `skipped_in_a_row` counts those up to it.

        Raises:
            NonFiniteLossError: Always, on all workers.
            RewindError: Instead, where training may go back.
        """
        raise NonFiniteLossError(f"{why}. {job.advice()}")
