"""The training time and phases between two reports, gathered to name workers that slow the others down."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.diagnosis import publisher
from lockstep.diagnosis.observed_steps import LinkUse
from lockstep.diagnosis.oversubscription import Oversubscription
from lockstep.diagnosis.phases import PHASES, Phase, Phases
from lockstep.diagnosis.stragglers import Straggler, StragglerWatch, rounded, spread_of
from lockstep.models.global_batch_norm import GlobalBatchNorm, Peers
from lockstep.observe.link_comparison import LinkComparison, SlowLink
from lockstep.observe.tcp_links import MAX_LINKS, LinkReader
from lockstep.run.balance import FIXED, LOADING, SCALING, OwnSeconds
from lockstep.world import observer
from lockstep.world.step_clock import StepClock
from lockstep.world.world import World


class Times(NamedTuple):
    """Seconds of an interval.

    Attributes:
        seconds: Wall time of training, with snapshots and checkpoints, without evaluations.
        phases: The parts of `seconds` by phase of the steps; on a device with streams, as seen by the device, since the
            host runs ahead of it.
    """

    seconds: float
    phases: Phases

    @property
    def wait_seconds(self) -> float:
        """The part of `seconds` spent waiting for data."""
        return self.phases.get("data_wait", 0.0)


NO_LINK = LinkUse(0, 0, 0, 0.0, 0, 0)
MIN_SECONDS = 1.0  # shorter reports are joined, because a scheduler can favor a worker for a moment


class WorkerTimes:
    """Measures the time between two reports, without gaps, even across epochs, on all workers.

    Args:
        clock: Of the steps.
        waits_in: The phases in which a worker may wait for others, so that they do not show which one is slow.
    """

    def __init__(self, world: World, clock: StepClock, waits_in: Collection[Phase]):
        self._world, self._clock = world, clock
        self._own = [number for number, phase in enumerate(PHASES) if phase not in waits_in]
        hosts = world.gather(socket.gethostname())
        self._watch, self._link_comparison = StragglerWatch(hosts), LinkComparison(hosts)
        self._links = LinkReader(None if len(set(hosts)) > 1 else lambda: iter(()))  # reading costs 10 µs a connection
        self._last = torch.zeros(world.size, len(PHASES), dtype=torch.float64, device="cpu")
        self._epoch = torch.zeros_like(self._last)
        self._oversubscription = Oversubscription()
        self.own: list[OwnSeconds] = []
        """Each worker's own time in the steps of the last report."""
        self._begin_window()
        self.restart()

    def restart(self) -> None:
        """Measure from now on, and discard the measurements since the last report."""
        self._clock.forget()
        self._links.take()
        self._start = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds` from the training time."""
        self._start += seconds

    def _begin_window(self) -> None:
        self._window = torch.zeros_like(self._last)
        self._window_steps, self._window_seconds = 0, 0.0

    def end(self) -> Times:
        """Return this worker's times since the last call; waits for the device."""
        steps = self._clock.take()
        phases: Phases = {phase: sum(step.get(phase, 0.0) for step in steps) for phase in PHASES}
        before, self._start = self._start, time.perf_counter()
        return Times(self._start - before, phases)

    def report(self, times: Times, steps: int) -> list[Straggler | SlowLink]:
        """Gather the times of the last steps, and return the workers and links to name, on rank 0. Collective."""
        phases = [times.phases[phase] for phase in PHASES]
        own = [*phases, self._oversubscription.check(), *_row(self._links.take())]
        rows = self._world.rows(torch.tensor(own, dtype=torch.float64, device="cpu"))
        seconds = rows[:, : len(PHASES)]
        self._last = seconds / max(1, steps)
        self.own = [
            OwnSeconds(*row)
            for row in zip(*(self._sums(seconds, kind) for kind in (SCALING, FIXED, LOADING)), strict=True)
        ]
        self._epoch = self._epoch + seconds
        self._window = self._window + seconds
        self._window_steps += steps
        self._window_seconds += times.seconds
        if self._window_seconds < MIN_SECONDS or not self._world.is_main or self._world.size == 1:
            return []
        count = max(1, self._window_steps)
        per_step = self._window / count
        compared: dict[str, Sequence[float]] = {PHASES[number]: per_step[:, number].tolist() for number in self._own}
        oversubscribed = [bool(each) for each in rows[:, len(PHASES)]]
        found = self._watch.update(compared, self._window_seconds / count, count, oversubscribed)
        self._begin_window()
        links = [_links(row) for row in rows[:, len(PHASES) + 1 :].tolist()]
        return [*found, *self._link_comparison.compare(links)]

    def _sums(self, seconds: torch.Tensor, phases: Collection[Phase]) -> list[float]:
        """Return each worker's own time in some of the phases."""
        sums: list[float] = seconds[:, [number for number in self._own if PHASES[number] in phases]].sum(1).tolist()
        return sums

    def spread(self) -> dict[str, dict[str, Any]]:
        """Return the range over the workers of each phase of the last report, in seconds per step."""
        columns = zip(PHASES, self._last.T.tolist(), strict=True)
        return {phase: spread_of(column) for phase, column in columns if any(column)}

    def take_epoch(self) -> dict[str, list[float]]:
        """Return the seconds of each phase since the last call, by worker."""
        taken, self._epoch = self._epoch, torch.zeros_like(self._epoch)
        columns = zip(PHASES, taken.T.tolist(), strict=True)
        return {phase: rounded(column) for phase, column in columns if any(column)}


def _row(links: Sequence[LinkUse]) -> list[float]:
    """Return links as numbers to gather: as many for any number of links."""
    return [value for link in (*links, *[NO_LINK] * MAX_LINKS)[:MAX_LINKS] for value in astuple(link)]


def _links(row: Sequence[float]) -> list[LinkUse]:
    """Return the links of a `_row`."""
    length = len(row) // MAX_LINKS
    found = (row[start : start + length] for start in range(0, len(row), length))
    return [
        LinkUse(int(own), int(peer), int(sent), busy, int(resent), int(trip))
        for own, peer, sent, busy, resent, trip in found
        if sent
    ]


class TimedPeers:
    """The collectives of a `GlobalBatchNorm`, whose time counts as waiting for other workers."""

    def __init__(self, peers: Peers, clock: StepClock):
        self._peers, self._clock = peers, clock

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return self._timed(self._peers.gather, row)

    def sum(self, row: torch.Tensor) -> torch.Tensor:
        return self._timed(self._peers.sum, row)

    def _timed(self, collective: Callable[[torch.Tensor], torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        self._clock.pause()
        try:
            return collective(row)
        finally:
            self._clock.resume()

    def __reduce__(self) -> Any:
        return _without_clock, (self._peers,)  # copies and files of a model have no clock


def _without_clock(peers: Peers) -> Peers:
    return peers


def build_clock(device: torch.device, model: nn.Module) -> StepClock:
    """Return a clock of the trainer's steps, instead of the observer's.

    The time of synchronized batch norms' collectives counts as waiting for other workers.
    """
    clock = StepClock(device, publisher.own_board())
    if observer.current:
        observer.current.follow_trainer(clock)
    for module in model.modules():
        if isinstance(module, GlobalBatchNorm) and module.peers is not None:
            module.peers = TimedPeers(module.peers, clock)
    return clock
