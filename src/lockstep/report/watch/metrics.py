"""The contents of metrics.jsonl so far: a run's progress, its curves, and how its last session ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal

from lockstep.files.jsonl import count, number, one_line
from lockstep.report.worker_records import StragglerRecord, phase_medians, phase_seconds, read_straggler


class Thinned:
    """The points of a curve, in order of x. When there are `most`, neighboring pairs are averaged.

    Args:
        most: Maximum number of points, even; after averaging, half of them are left.
    """

    def __init__(self, most: int = 2048):
        self._most = most
        self._stride = 1  # points averaged into one
        self._points: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []  # points of the next average

    def add(self, x: float, y: float) -> None:
        self._open.append((x, y))
        if len(self._open) < self._stride:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) == self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(list(pair)) for pair in pairs]
            self._stride *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(x, y) of the averaged points, including the last, incomplete average."""
        return [*self._points, _mean(self._open)] if self._open else list(self._points)

    def __bool__(self) -> bool:
        return bool(self._points or self._open)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


Split = Literal["train", "val"]
RECENT = 8  # step records in the median for "now", since an epoch's last record may cover only one step
STEP_FIGURES = ("lr", "data_wait", "loss_scale", "skipped_steps")


class Metrics:
    """Collects records in order; missing fields are ignored.

    `curves` are over epochs; `rates` are `rate_unit` of the last session, over steps.
    """

    def __init__(self, config: Mapping[str, Any]):
        """`config` has the contents of the run's config.yaml; empty if there is none."""
        self._config = config
        self.job: Mapping[str, Any] = {}
        self.curves: dict[tuple[str, Split], Thinned] = {
            (name, split): Thinned() for name in ("loss", "top1") for split in ("train", "val")
        }
        self.rates = Thinned()
        self.rate_unit = "images/s"
        self.figures: dict[str, float] = {}  # of the last step record
        self.by_rank: dict[str, list[float]] = {}  # a program's seconds per step in each phase, in the last record
        self.step = 0
        self.time_seconds = 0.0
        self.last_time: float | None = None  # Unix time of the newest record
        self.longest_gap_seconds = 0.0  # between two records of the last session
        self.top1_after: dict[int, float] = {}  # of each evaluation
        self.ending = ""  # how the last session ended; "" if it has not ended
        self.is_complete = False  # whether training is complete
        self.straggler: StragglerRecord | None = None  # the newest of the last session
        self._epochs = count(config, "epochs")
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._recent_phases: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._times = Thinned()  # unix time by step, of the last session

    def add(self, record: Mapping[str, Any]) -> None:
        handlers = {
            "run": self._begin,
            "step": self._add_steps,
            "epoch": self._add_epoch,
            "desired": self._reach,
            "stop": self._stop,
            "straggler": self._add_straggler,
            "end": self._end,
        }
        kind = record.get("kind")
        handle = handlers.get(kind) if isinstance(kind, str) else None
        if handle is None:
            return
        self.step = count(record, "step") or 0
        self.time_seconds = number(record, "time_seconds") or self.time_seconds
        self._pass_time(number(record, "unix_time"))
        handle(record)

    def _pass_time(self, unix_time: float | None) -> None:
        if unix_time is None:
            return
        if self.last_time is not None:
            self.longest_gap_seconds = max(self.longest_gap_seconds, unix_time - self.last_time)
        self.last_time = unix_time

    def _begin(self, record: Mapping[str, Any]) -> None:
        self.job = record
        self.ending, self.is_complete = "", False
        self.longest_gap_seconds = 0.0
        self.rates, self._times = Thinned(), Thinned()
        self._recent.clear()
        self._recent_phases.clear()
        self.straggler = None
        self.rate_unit = "samples/s" if self.script or record.get("items") == "samples" else "images/s"

    def _add_steps(self, record: Mapping[str, Any]) -> None:
        self.figures = {name: value for name in STEP_FIGURES if (value := number(record, name)) is not None}
        self._add_curves(record, "train")
        rate = number(record, "images_per_second")
        if self.program:
            self.by_rank = phase_seconds(record, count(self.job, "workers") or 0)
            self.rate_unit = "steps/s" if rate is None else "samples/s"
            rate = number(record, "steps_per_second") if rate is None else rate
        if rate is not None:
            self.rates.add(self.step, rate)
            self._recent.append(rate)
        if phases := phase_medians(record):
            self._recent_phases.append(phases)
        if self.last_time is not None:
            self._times.add(self.step, self.last_time)

    def _add_epoch(self, record: Mapping[str, Any]) -> None:
        self._epochs = count(record, "epochs") or self._epochs
        if record.get("split") != "val":
            return
        self._add_curves(record, "val")
        top1 = number(record, "top1")
        if top1 is not None:
            self.top1_after[self.step] = top1
        if self.step == self.last_step:
            self.ending, self.is_complete = "finished", True

    def _reach(self, record: Mapping[str, Any]) -> None:
        desired = number(record, "desired_acc")
        name = f"desired accuracy {100 * desired:g} % reached" if desired is not None else "desired accuracy reached"
        self.ending, self.is_complete = name, True

    def _stop(self, record: Mapping[str, Any]) -> None:
        self.ending = f"stopped by {one_line(record.get('reason')) or 'a signal'}"

    def _end(self, record: Mapping[str, Any]) -> None:
        code = count(record, "exit_code")
        self.ending = "finished" if code == 0 else f"failed with exit code {code}" if code else "failed"
        self.is_complete = code == 0

    def _add_straggler(self, record: Mapping[str, Any]) -> None:
        self.straggler = read_straggler(record) or self.straggler

    def _add_curves(self, record: Mapping[str, Any], split: Split) -> None:
        epoch = self.epoch
        for name in ("loss", "top1"):
            value = number(record, name)
            if value is not None and epoch is not None:
                self.curves[name, split].add(epoch, value)

    @property
    def program(self) -> str:
        """The command of a program that `lockstep run` has observed; "" for a run of `lockstep train`."""
        return one_line(self.job.get("program"))

    @property
    def script(self) -> str:
        """The command of a script with a loop of its own; "" for other runs."""
        return one_line(self.job.get("script"))

    @property
    def lacks_classes(self) -> bool:
        """Whether there are losses, but no accuracies."""
        return any(bool(self.curves["loss", split]) and not self.curves["top1", split] for split in ("train", "val"))

    @property
    def steps_per_epoch(self) -> int | None:
        return count(self.job, "steps_per_epoch") or None

    @property
    def epoch(self) -> float | None:
        """Epochs done, with fractions."""
        return self.step / self.steps_per_epoch if self.steps_per_epoch else None

    @property
    def epochs(self) -> int | None:
        """Epochs of the whole run."""
        return self._epochs or None

    @property
    def last_step(self) -> int | None:
        """Steps of the whole run."""
        planned = self.epochs * self.steps_per_epoch if self.epochs and self.steps_per_epoch else None
        most = count(self._config, "max_steps")
        return min((steps for steps in (planned, most) if steps), default=None)

    @property
    def rate_now(self) -> float | None:
        """Throughput over the latest step records."""
        return median(self._recent) if self._recent else None

    @property
    def rate_median(self) -> float | None:
        """Throughput over the last session."""
        return median(rate for _, rate in self.rates.points) if self.rates else None

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds per step of the median worker in each phase, over the latest step records; empty if not recorded."""
        phases = dict.fromkeys(phase for recent in self._recent_phases for phase in recent)
        return {phase: median(recent.get(phase, 0.0) for recent in self._recent_phases) for phase in phases}

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining time from the last two epochs, including evaluations; None if unknown."""
        times, last = self._times.points, self.last_step
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
