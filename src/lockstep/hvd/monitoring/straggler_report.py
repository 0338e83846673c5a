"""The straggler report: which ranks slow the others down.

Each worker writes its own step times to the job's store, so that no collective is needed; rank 0 compares them.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from lockstep.diagnosis.phases import HVD_PHASES, Phases
from lockstep.diagnosis.stragglers import Oversubscription, Straggler, StragglerWatch
from lockstep.hvd.monitoring.timeline import Timeline
from lockstep.world.step_clock import StepClock

MIN_STEPS = 20  # in each report
STEP = "step"  # seconds of the whole step, waiting included
STEPS = "steps"  # the number of steps
OVERSUBSCRIBED = "oversubscribed"
LONGEST = 0.05  # share of the longest steps that do not count, such as those with an evaluation or a checkpoint
logger = logging.getLogger("lockstep.hvd")


class StragglerReport:
    """Publishes this worker's step times and, on rank 0, compares all workers'; a `Check` of `StoreWatch`.

    Args:
        hosts: The host of each rank.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], interval_seconds: float, step_times: StepClock, timeline: Timeline
    ) -> None:
        self.interval_seconds = interval_seconds
        self._rank = rank
        self._keys = [f"step_times/{each}" for each in range(len(hosts))]
        self._step_times = step_times
        self._timeline = timeline
        self._watch = StragglerWatch(hosts)
        self._oversubscription = Oversubscription()
        self._published = 0  # number of reports of this worker
        self._compared = [0] * len(hosts)  # by rank, the number of its last report in a comparison

    def check(self, store: Any) -> None:
        """Publish this worker's report if it has taken enough steps; on rank 0, log each straggler once."""
        steps = self._step_times.take_ready(MIN_STEPS)
        if steps:
            self._published += 1
            report = summarize(steps) | {OVERSUBSCRIBED: self._oversubscription.check()}
            store.set(self._keys[self._rank], json.dumps([self._published, report]))
        for straggler in self._compare(store) if self._rank == 0 else ():
            logger.warning(f"{straggler.describe()}; {straggler.advice}")
            self._timeline.mark("STRAGGLER", asdict(straggler))

    def _compare(self, store: Any) -> list[Straggler]:
        """Return the new stragglers once every rank has published a new report."""
        if self._compared[self._rank] == self._published or not store.check(self._keys):
            return []
        numbers, reports = zip(*(json.loads(store.get(key)) for key in self._keys), strict=True)
        if any(number == before for number, before in zip(numbers, self._compared, strict=True)):
            return []
        self._compared = list(numbers)
        seconds: dict[str, list[float]] = {phase: [report[phase] for report in reports] for phase in HVD_PHASES}
        oversubscribed = [report[OVERSUBSCRIBED] for report in reports]
        return self._watch.update(seconds, reports[0][STEP], reports[0][STEPS], oversubscribed)


def summarize(steps: Sequence[Phases]) -> dict[str, float]:
    """Return the mean seconds of each phase and of `STEP`, without the longest steps, and the number of `STEPS`."""
    seconds: dict[str, list[float]] = {phase: [step.get(phase, 0.0) for step in steps] for phase in HVD_PHASES}
    seconds[STEP] = [sum(step.values()) for step in steps]
    counted = len(steps) - math.ceil(LONGEST * len(steps))
    return {name: fmean(sorted(each)[:counted]) for name, each in seconds.items()} | {STEPS: len(steps)}
