"""Sends the steps of a job's workers to rank 0 through the job's store, without a collective.

Lockstep's launcher reads what its workers publish. Other launchers do not, so rank 0 does what that launcher would do.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from lockstep.config.mapping import from_mapping
from lockstep.diagnosis.observed_steps import ObservedSteps, ProcessSteps
from lockstep.diagnosis.oversubscription import Oversubscription
from lockstep.observe.job_steps import JobSteps

INTERVAL_SECONDS = 1.0  # between two messages of a worker, at least
MAX_PER_SECOND = 100.0  # messages of all workers
LAST_SECONDS = 2.0  # in which the other workers send their last steps
POLL_SECONDS = 0.02


class StepExchange:
    """Sends this worker's observed steps and, on rank 0, passes on those of all workers.

    Args:
        published: Returns this worker's steps so far.
        report_seconds: The least time between two reports of steps.
        job: On rank 0, receives the steps of all workers, once all have taken some; called when that is so.
        keeps_records: Whether rank 0 then writes records.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        published: Callable[[], ObservedSteps],
        report_seconds: float,
        job: Callable[[], JobSteps] | None,
        keeps_records: bool = False,
    ) -> None:
        least = size / MAX_PER_SECOND
        self.interval_seconds = max(least, min(report_seconds or INTERVAL_SECONDS, INTERVAL_SECONDS))
        self._rank = rank
        self._keys = [f"observed_steps/{each}" for each in range(size)]
        self._published = published
        self._sent = published()  # what came before is of another job
        self._job, self._keeps_records = job, keeps_records
        self._steps: JobSteps | None = None  # on rank 0, once it has received steps of all workers
        self._oversubscription = Oversubscription()

    def check(self, store: Any) -> None:
        """Send this worker's steps if there are new ones; on rank 0, receive those of all workers."""
        steps = self._published()
        if steps != self._sent and steps.steps:
            self._sent = steps
            own = [socket.gethostname(), os.getpid(), self._oversubscription.check(), asdict(steps)]
            store.set(self._keys[self._rank], json.dumps(own))
        if self._job and store.check(self._keys):
            self._receive([json.loads(each) for each in store.multi_get(self._keys)], self._job)

    def _receive(self, workers: Sequence[tuple[str, int, bool, Any]], job: Callable[[], JobSteps]) -> None:
        if self._steps is None:
            self._steps = job()
            self._steps.begin([host for host, *_ in workers])
        for rank, (_, pid, oversubscribed, values) in enumerate(workers):
            steps = from_mapping(ObservedSteps, values, "steps")
            self._steps.add([ProcessSteps(rank, pid, len(workers) > 1, steps)], oversubscribed)

    def finish(self, store: Any) -> None:
        """Send the last steps; for records, rank 0 waits for those of the other workers, which finish now, too."""
        last, deadline = [f"{key}/last" for key in self._keys], time.monotonic() + LAST_SECONDS
        self.check(store)
        store.set(last[self._rank], "")
        waits = self._job and (self._steps.is_recorded if self._steps else self._keeps_records)
        while waits and not store.check(last) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.check(store)
