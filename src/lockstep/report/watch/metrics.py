"""The state of a run by its records so far: progress, curves, rates, and how its last session ended."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from lockstep.files.jsonl import Record, count, number, one_line
from lockstep.files.metric_records import Position, Split
from lockstep.report.worker_records import RunRecords

MAX_POINTS = 2048  # per curve


class Metrics(RunRecords):
    """The records of a run that `lockstep watch` follows."""

    def __init__(self, config: Mapping[str, Any]):
        """`config` has the contents of the run's config.yaml; empty if there is none."""
        super().__init__(MAX_POINTS)
        self.planned_epochs = count(config, "epochs") or None
        self._max_steps = count(config, "max_steps")
        self._evaluated_step: int | None = None  # in the last session
        self._newest: dict[Split, Record] = {}

    def begin_session(self, record: Record) -> None:
        super().begin_session(record)
        self._evaluated_step = None

    def take_step(self, position: Position, record: Record) -> None:
        super().take_step(position, record)
        self._newest["train"] = record

    def take_epoch(self, split: Split, position: Position, record: Record) -> None:
        super().take_epoch(split, position, record)
        if split == "val":
            self._evaluated_step, self._newest["val"] = self.step, record

    def curve(self, figure: str, split: Split) -> list[float]:
        """Return the values of a figure so far; of training, those of the `step` records."""
        columns = self.steps if split == "train" else self.epochs["val"]
        return [value for _, value in columns.points(figure)]

    def is_nan(self, figure: str, split: Split) -> bool:
        """Whether a figure is NaN or infinite, which records have as null, in the newest record."""
        return self._newest.get(split, {}).get(figure, 0) is None

    @property
    def ending(self) -> str:
        """How the last session ended; "" if it has not ended."""
        match self.end.get("kind"):
            case "desired":
                desired = number(self.end, "desired_acc")
                return f"desired accuracy {'' if desired is None else f'{100 * desired:g} % '}reached"
            case "stop":
                return f"stopped by {one_line(self.end.get('reason')) or 'a signal'}"
            case "end":
                code = count(self.end, "exit_code")
                return "finished" if code == 0 else f"failed with exit code {code}" if code else "failed"
        return "finished" if self.last_step is not None and self._evaluated_step == self.last_step else ""

    @property
    def is_complete(self) -> bool:
        """Whether training is complete."""
        return self.end.get("kind") == "desired" or self.ending == "finished"

    @property
    def program(self) -> str:
        """The command of a program that `lockstep run` has observed; "" for a run of `lockstep train`."""
        return one_line(self.start.get("program"))

    @property
    def script(self) -> str:
        """The command of a script with a loop of its own; "" for other runs."""
        return one_line(self.start.get("script"))

    @property
    def last_step(self) -> int | None:
        """Steps of the whole run."""
        planned = (self.planned_epochs or 0) * (self.steps_per_epoch or 0)
        return min((steps for steps in (planned, self._max_steps) if steps), default=None)

    @property
    def latest(self) -> Mapping[str, float]:
        """The figures of the last step record."""
        return self.recent[-1] if self.recent else {}

    @property
    def rate_field(self) -> tuple[str, str]:
        """The field with the throughput, and its unit."""
        if self.program and "images_per_second" not in self.latest:
            return "steps_per_second", "steps/s"
        has_samples = self.program or self.script or self.start.get("items") == "samples"
        return "images_per_second", "samples/s" if has_samples else "images/s"

    @property
    def recent_rates(self) -> list[float]:
        """Throughput of the latest step records."""
        return [figures[self.rate_field[0]] for figures in self.recent if self.rate_field[0] in figures]

    @property
    def rates(self) -> list[float]:
        """Throughput over the steps of the last session."""
        return [rate for _, rate in self.steps.points(self.rate_field[0], self._first_step)]

    @property
    def _first_step(self) -> int:
        return count(self.start, "step") or 0

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds per step of the median worker in each phase, over the latest step records; empty if not recorded."""
        phases = dict.fromkeys(phase for recent in self.recent_phases for phase in recent)
        return {phase: median(recent.get(phase, 0.0) for recent in self.recent_phases) for phase in phases}

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining time from the last two epochs, including evaluations; None if unknown."""
        times, last = self.steps.points("unix_time", self._first_step), self.last_step
        if last is None or self.steps_per_epoch is None or len(times) < 2:
            return None
        end_step, end_time = times[-1]
        begin_step, begin_time = next(
            (step, time) for step, time in times if step >= end_step - 2 * self.steps_per_epoch or step == end_step
        )
        if begin_step == end_step:
            begin_step, begin_time = times[-2]
        if begin_step >= end_step:  # damaged records
            return None
        seconds = (end_time - begin_time) / (end_step - begin_step) * (last - end_step)
        return max(0.0, seconds - max(0.0, now - end_time))
