"""Counts the steps and samples of a worker's program, reads what explains its speed, and publishes both."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from lockstep.diagnosis import REPORT, REPORT_SECONDS, of_worker
from lockstep.diagnosis.board import Board
from lockstep.diagnosis.loaded_samples import LoadedSamples
from lockstep.diagnosis.observed_steps import (
    NO_FACTS,
    PHASES,
    ObservedSteps,
    ProgramFacts,
    TrainedState,
    sample_waits,
    total_seconds,
    usual_seconds,
)
from lockstep.diagnosis.phases import Phases
from lockstep.files.io_totals import IoTotals
from lockstep.observe.tcp_links import LinkReader
from lockstep.script_check.parameters import parameters_of

if TYPE_CHECKING:
    import torch

INTERVAL_SECONDS = 1.0  # between two publications
REPORT_STEPS, MAX_REPORT_STEPS = 20, 1000  # in a report, at least and at most


class StepCounts:
    """The steps and samples of this process, once `begin_generation` is called.

    Attributes:
        published: What was published last, at most a second ago.
        report_seconds: The least time between two reports in it; 0: without reports.
        io: The I/O of this process, if it is counted.
        is_told: Whether the program says when it has taken a step.
    """

    def __init__(self) -> None:
        self.report_seconds = float(os.environ.get(REPORT) or REPORT_SECONDS)
        self.loaders, self.is_told = LoadedSamples(), False
        self._turn: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have stepped in the current step
        self._first: Callable[[], Any] = lambda: None  # the first of these
        self._unsure: deque[torch.Tensor] = deque()  # whether GradScaler skipped one of the last steps
        self._unreported: deque[Phases] = deque(maxlen=MAX_REPORT_STEPS)
        self._writing = threading.Lock()  # the board

    def begin_generation(self, board: Board | None) -> None:
        """Count from 0, on a board of this generation of the workers."""
        self.board, self.published, self.io = board, ObservedSteps(), IoTotals()
        self.steps, self._links = 0, LinkReader()
        self._told_samples: int | None = None
        self._last = self._written = 0.0  # when the last step ended, and the last one that is published
        self._reported = time.monotonic()
        self._first_step = 0.0, 0, 0  # when the first one ended, its number, and the samples until then
        for each in (self._unreported, self._unsure, self.loaders):
            each.clear()

    @property
    def samples(self) -> int:
        return self.loaders.samples if self._told_samples is None else self._told_samples

    def count(self, optimizer: Any, is_readable: bool) -> bool:
        """Count the step of an optimizer, and return whether a step of the program ends with it.

        Args:
            is_readable: Whether values of the device can be read, such as whether GradScaler has skipped the step.
        """
        first = self._first()
        is_only = optimizer is first and len(self._turn) == 1  # the usual case, without the slow set
        if not (is_only or optimizer in self._turn or not self._turn):
            self._turn.add(optimizer)
            return False
        # If the first one of the last step has stopped, the step of this one in between was a step of its own.
        self.steps += 1 if optimizer is first or not self._turn else 2
        if not is_only:
            self._first = weakref.ref(optimizer)
            self._turn.clear()
            self._turn.add(optimizer)
        found = getattr(optimizer, "found_inf", None)  # GradScaler's, of fused optimizers
        if found is not None and is_readable:
            self._unsure.append(found)
        return True

    def count_told(self, samples: int | None) -> None:
        """Count a step that the program says it has taken."""
        if not self.is_told:
            self.is_told, self.steps = True, 0
            self._first_step, self.published = (0.0, 0, 0), ObservedSteps(report=self.published.report)
            self._unsure.clear()
        self.steps += 1
        if samples is not None:
            self._told_samples = (self._told_samples or 0) + int(samples)

    def subtract_skipped(self, unread: int) -> None:
        """Read which steps were skipped, up to the last `unread` ones, which the device may not have reached."""
        while len(self._unsure) > unread:
            self.steps -= bool(self._unsure.popleft().item())

    def ends_first(self) -> bool:
        """Note the end of a step; return whether it is the first, which includes the start of the loaders."""
        self._last = time.monotonic()
        if self._first_step[1]:
            return False
        self._first_step, self._written = (self._last, self.steps, self.samples), self._last
        self._links.take()
        return True

    @property
    def are_due(self) -> bool:
        """Whether to publish the steps, at the end of one."""
        return self._last - self._written >= min(INTERVAL_SECONDS, self.report_seconds or INTERVAL_SECONDS)

    def publish(self, steps: Sequence[Phases], facts: ProgramFacts, state: TrainedState | None) -> None:
        """Publish the steps so far.

        Args:
            steps: The times of those that were not published yet, as far as they are known.
            state: None: the last one.
        """
        self._written, before = self._last, self.published
        self._unreported += steps
        is_due = 0 < self.report_seconds <= self._last - self._reported and len(self._unreported) >= REPORT_STEPS
        if is_due:
            usual = usual_seconds(self._unreported)
            before = replace(before, report=before.report + 1, report_steps=len(self._unreported), report_seconds=usual)
            before = replace(before, links=self._links.take())
            self._reported = self._last
            self._unreported.clear()
        totals = total_seconds(steps)
        sums = (own + totals.get(phase, 0.0) for own, phase in zip(before.phase_seconds, PHASES, strict=True))
        self.published = replace(
            before,
            steps=self.steps,
            samples=self.samples or None,
            interval_steps=max(0, self.steps - self._first_step[1]),  # the first ones may have been skipped
            interval_samples=self.samples - self._first_step[2],
            timed_steps=before.timed_steps + len(steps),
            interval_seconds=self._last - self._first_step[0],
            phase_seconds=tuple(sums),
            waits=sample_waits(before.waits, steps, before.timed_steps + 1),
            facts=facts,
            state=state or before.state,
        )
        self._write()

    def publish_io(self, totals: IoTotals) -> None:
        self.io = totals
        self._write()

    def _write(self) -> None:
        if self.board:
            with self._writing:
                self.board.publish_steps(replace(self.published, io=self.io))


class FactReader:
    """Reads the gradients once, and the machine's idle cores at each `read`.

    Attributes:
        optimizer: Returns the first optimizer that stepped, or None.
        wrapper: Returns the newest DistributedDataParallel, or None.
    """

    def __init__(self) -> None:
        self.optimizer: Callable[[], Any] = lambda: None
        self.wrapper: Callable[[], Any] = lambda: None
        self._gradients = NO_FACTS
        self.begin()

    def begin(self) -> None:
        """Count the idle cores from now on."""
        self._start, self._idle = time.monotonic(), psutil.cpu_times().idle

    def read(self, cores: int, **known: Any) -> ProgramFacts:
        """Return the facts; `cores`: how many the workers of this host may use; `known`: other facts."""
        if not self._gradients.tensors and (optimizer := self.optimizer()) is not None:
            self._gradients = _gradients(optimizer, self.wrapper())
        idle = (psutil.cpu_times().idle - self._idle) / max(time.monotonic() - self._start, 1e-3)
        host: dict[str, Any] = {"cores": cores, "local_workers": int(of_worker("LOCAL_WORLD_SIZE") or 0)}
        return replace(self._gradients, **known, **host, free_cores=min(idle, cores))


def _gradients(optimizer: Any, wrapper: Any) -> ProgramFacts:
    trained = [each for each in parameters_of(optimizer) if each.requires_grad]
    gradients = [each if each.grad is None else each.grad for each in trained]
    size_bytes = sum(each.numel() * each.element_size() for each in gradients)
    largest = max((each.element_size() for each in gradients), default=0)
    exchange = ""
    if compression := getattr(optimizer, "_compression", None):
        exchange = "hvd" if getattr(compression, "__name__", "") == "NoneCompressor" else "hvd hook"
    elif wrapper is not None:
        exchange = "ddp hook" if getattr(wrapper, "_comm_hooks", None) else "ddp"
    return ProgramFacts(size_bytes, largest, len(gradients), exchange)
