"""Observes this process in the jobs that it joins, under launchers that do not watch their workers."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.diagnosis import publisher
from lockstep.diagnosis.board import Board
from lockstep.diagnosis.group_watch import GroupWatch, StoreWatch
from lockstep.diagnosis.idle_clock import hang_limit
from lockstep.errors import ConfigError, LockstepError
from lockstep.files.output import say
from lockstep.observe.job_steps import JobSteps
from lockstep.observe.step_exchange import StepExchange


class GroupObservation:
    """Takes part in one job after the other: explains hangs, names slow workers, and keeps records.

    Args:
        observe: Observes this process's steps from 0, given its board; returns the observer.
        end: Called with the error if a hang ends the job.
        folder: Where rank 0 writes records, or None.
    """

    def __init__(
        self, observe: Callable[[Board | None], Any], end: Callable[[LockstepError], None], folder: Path | None
    ) -> None:
        self._observe = observe
        self._end = end
        self._folder = folder
        self._numbers = itertools.count()  # of the jobs: their stores may be the same
        self._steps: JobSteps | None = None  # on rank 0
        self._size = 0  # of the current job; 0: none
        self._owner = 0  # the process that takes part in it: a forked child does not
        self._leaving: list[Callable[[], None]] = []

    def join(self, store: Any, rank: int, size: int) -> bool:
        """Take part in a job; return False if this process takes part in one with several workers already.

        Args:
            store: The job's store. All workers join.
        """
        if self._owner == os.getpid() and self._size > 1:
            return False
        self.leave()
        if self._owner != os.getpid():
            self._steps = None  # of the parent process
        from torch.distributed import PrefixStore

        own = PrefixStore(f"lockstep/observed/{next(self._numbers)}" if size > 1 else "alone", store)
        self._size, self._owner = size, os.getpid()
        if size > 1 and hang_limit() and not publisher.own_board():
            self._leaving.append(GroupWatch(own, rank, size, self._hang).close)
        observer, job = self._observe(publisher.own_board()), self._job if rank == 0 else None
        if self._folder:
            observer.count_io()

        def published() -> Any:
            return replace(observer.counts.published, io=observer.counts.io)

        exchange = StepExchange(rank, size, published, observer.counts.report_seconds, job, self._folder is not None)
        observer.states.keep_each(2 * exchange.interval_seconds)
        self._leaving.append(StoreWatch(own, exchange.check, exchange.interval_seconds, exchange.finish).close)
        self._leaving.append(observer.guard(observer.finish))
        return True

    def leave(self) -> None:
        """Leave the current job, if any."""
        leaving, self._leaving, self._size = self._leaving, [], 0
        while leaving and self._owner == os.getpid():
            leaving.pop()()

    def close(self) -> None:
        """Leave the current job, and write the last records, when the interpreter exits."""
        self.leave()
        if self._steps and self._owner == os.getpid():
            self._steps.close(1 if hasattr(sys, "last_type") else 0)  # set by an exception that ends the program

    def _hang(self, error: LockstepError) -> None:
        if self._steps:
            self._steps.close(error.exit_code)
        self._end(error)

    def _job(self) -> JobSteps:
        if self._steps is None:
            try:
                self._steps = JobSteps(("python", *sys.argv), self._folder)
            except ConfigError as error:
                say(f"lockstep: {error}; the job's steps are not recorded")
                self._steps = JobSteps(())
        return self._steps
