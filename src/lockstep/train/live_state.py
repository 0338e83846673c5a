"""What a worker keeps of a run when a peer is lost: its data, and its state after the last complete step.

In the next generation, all workers take the state of the one furthest ahead: one may have completed a step in which
another failed. Figures that were not in a record yet are added by those that stay; those of a lost worker are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lockstep.data.sets import ImageData
from lockstep.train.checkpoints.snapshot import Snapshot
from lockstep.train.metrics import Totals
from lockstep.train.monitoring.worker_times import Times
from lockstep.world.world import World


def keeps_live_state(world: World) -> bool:
    """Whether workers that stay keep their state: an accelerator may hold what an aborted collective has left."""
    return world.rank_info.snapshots is not None and world.device.type == "cpu"


class StepBoundary:
    """The state between two steps, as far as a step that fails has changed it.

    Args:
        model: Its buffers, which forward passes change.
        is_kept: Whether to keep them at all.
    """

    def __init__(self, model: nn.Module, is_kept: bool):
        self.unreported = 0  # complete steps since the last record
        self.is_whole = True  # whether `restore` can go back to the end of the last step
        self._buffers = [each for each in model.buffers() if each.numel()] if is_kept else []
        self._before = [torch.empty_like(each) for each in self._buffers]
        self._is_in_step = False

    def begin(self) -> None:
        """Begin a step."""
        if self._buffers:
            torch._foreach_copy_(self._before, self._buffers)
        self._is_in_step = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Surround the update of the weights, which cannot be undone."""
        self.is_whole = False
        yield

    def end(self) -> None:
        """End a step, after the update."""
        self.is_whole, self._is_in_step = True, False
        self.unreported += 1

    def restore(self) -> None:
        """Go back to the end of the last step."""
        if self._buffers and self._is_in_step:
            torch._foreach_copy_(self._buffers, self._before)


@dataclass(frozen=True)
class LiveState:
    """The state after a step, with what this worker has counted since the last record.

    Args:
        unreported: The number of these steps.
        totals: Their sums.
        times: Their seconds.
        records: The last records, which a lost rank 0 may not have written.
    """

    snapshot: Snapshot
    unreported: int
    totals: Totals
    times: Times
    records: Sequence[Mapping[str, Any]]

    def counted(self) -> dict[str, Any]:
        """Return what the other workers need to know, as JSON."""
        return {
            "step": self.snapshot.step,
            "unreported": self.unreported,
            "totals": asdict(self.totals),
            "times": list(self.times),
            "records": list(self.records),
        }


@dataclass
class Kept:
    """What a worker keeps from one generation to the next."""

    data: ImageData | None = None
    state: LiveState | None = None
