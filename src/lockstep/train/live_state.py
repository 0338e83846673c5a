"""What a worker keeps of a run when a peer is lost: its data, and its state after the last complete step.

In the next generation, all workers take the state of the one furthest ahead: one may have completed a step in which
another failed. Figures that were not in a record yet are counted by those that stay; those of a lost worker are lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.data.sets import ImageData
from lockstep.models.buffers import Buffers
from lockstep.train.checkpoints.snapshot import Snapshot
from lockstep.train.metrics import Totals
from lockstep.train.monitoring.worker_times import Times
from lockstep.train.progress import Position
from lockstep.world import generations
from lockstep.world.world import World


def keeps_live_state(world: World) -> bool:
    """Whether this worker keeps its state if it stays: an accelerator may hold what an aborted collective has left."""
    return world.device.type == "cpu" and world.rank_info.snapshots is not None and generations.stays()


class StepBoundary:
    """The end of the last complete step, as far as a step that fails has changed the state.

    Args:
        model: Its buffers, which forward passes change.
        keeps_buffers: Whether to keep them, also for an update that is skipped.
        is_live: Whether `restore` will be asked for, if a worker is lost.
    """

    def __init__(self, model: nn.Module, progress: Position, keeps_buffers: bool, is_live: bool):
        self.unreported = 0  # complete steps since the last record
        self._model, self._progress = model, progress
        self._keeps_buffers, self._is_live = keeps_buffers or is_live, is_live
        self._buffers = Buffers()
        self._is_updating = False
        self._before_end: dict[str, Any] | None = None

    def begin(self) -> None:
        """Begin a step."""
        if self._keeps_buffers:
            self._buffers.keep(self._model)

    def restore_buffers(self) -> None:
        """Go back to the buffers before the step."""
        self._buffers.put_back()

    def update(self) -> None:
        """Begin to update the weights, which cannot be undone."""
        self._is_updating = True

    def end(self) -> None:
        """End a step, after the update."""
        self._is_updating = False
        self._buffers.forget()
        self.unreported += 1

    def begin_end_of_epoch(self) -> None:
        """Begin what follows an epoch, an evaluation and a checkpoint, which is done again if it is not completed."""
        self._before_end = dict(vars(self._progress))

    def complete_end_of_epoch(self) -> None:
        self._before_end = None

    def restore(self) -> bool:
        """Go back to the end of the last step, if possible; return whether it is."""
        if not self._is_live or self._is_updating:
            return False
        self._buffers.put_back()
        vars(self._progress).update(self._before_end or {})
        return True


@dataclass(frozen=True)
class Live:
    """The state after a step.

    Args:
        fingerprint: Of the weights, equal on all workers; 0 if replicas are not compared.
        records: The last records, which a lost rank 0 may not have written.
    """

    snapshot: Snapshot
    fingerprint: int
    records: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class LiveState(Live):
    """The state of a training, with what this worker has counted since the last record."""

    steps: Sequence[Totals]
    times: Times

    def counted(self) -> dict[str, Any]:
        """Return what the other workers need to know, as JSON."""
        return {"step": self.snapshot.step, "unreported": len(self.steps), "times": list(self.times)}


@dataclass
class Kept:
    """What this process keeps of a run from one generation to the next.

    Attributes:
        reached: The newest complete step.
        live: The state after it, if a loss has interrupted the run.
        data: The data set, if a loss has interrupted the run.
    """

    reached: int = 0
    live: Any = None
    data: ImageData | None = None


_kept: dict[str, Kept] = {}


def kept_of(folder: Path) -> Kept:
    """Return what this process keeps of the run in a folder."""
    return _kept.setdefault(os.path.abspath(folder), Kept())
