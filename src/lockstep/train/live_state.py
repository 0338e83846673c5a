"""What a worker keeps of a run when a peer is lost: its data, and its state after the last complete step.

In the next generation, all workers take the state of the one furthest ahead: one may have completed a step in which
another failed. Figures that were not in a record yet are added by those that stay; those of a lost worker are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.data.sets import ImageData
from lockstep.train.checkpoints.snapshot import Snapshot
from lockstep.train.metrics import Totals
from lockstep.train.monitoring.worker_times import Times

if TYPE_CHECKING:
    from lockstep.train.job import Job


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


@dataclass
class Kept:
    """What a worker keeps from one generation to the next."""

    data: ImageData | None = None
    state: LiveState | None = None


def live_state(job: Job) -> LiveState | None:
    """Return the state after the last complete step; None if this worker does not have it whole."""
    from lockstep.train.checkpoints.resume import snapshot_of

    boundary = job.boundary
    if not boundary.is_whole or job.optim.strategy.gathers_state:
        return None
    boundary.restore()
    totals = sum(job.meter.own_totals()[: boundary.unreported], Totals())
    return LiveState(snapshot_of(job), boundary.unreported, totals, job.interval.end(), list(job.session.records))


def settle(job: Job, live: LiveState | None) -> None:
    """Record what the workers that stay have counted, if all have taken over the state of one of them. Collective.

    Args:
        live: The state that this worker kept, if any; possibly of an earlier step than the one taken over.
    """
    from lockstep.train.run_records import record_steps

    own = None
    if live:
        own = {
            "step": live.snapshot.step,
            "unreported": live.unreported,
            "totals": asdict(live.totals),
            "times": list(live.times),
            "records": live.records,
        }
    found = [each for each in job.world.gather(own) if each]
    source = next((each for each in found if each["step"] == job.progress.step), None)
    if source is None:
        return
    job.session.complete_records(source["records"])
    if source["unreported"]:
        totals = sum((Totals(**each["totals"]) for each in found), Totals())
        times = Times(*source["times"])
        job.progress.add_interval([totals], times)
        record_steps(job, totals, times)
