"""One run in a report with its curves, independent of the files it was read from, and names of runs for legends.

Long curves are thinned. Names are short and distinct, made from the settings in which the runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lockstep.files.jsonl import number, text, whole
from lockstep.files.metric_records import Split
from lockstep.report.document import numbered, told_apart
from lockstep.report.measured_step import MeasuredStep
from lockstep.report.scaling_series import machine_of
from lockstep.report.worker_records import StragglerRecord

MAX_POINTS = 2_000  # per line: more than the pixel columns of most screens


@dataclass(frozen=True)
class Curve:
    """One metric over a run; all four sequences have the same length.

    Args:
        epochs: Epochs done, with fractions.
        seconds: Training time.
        values: The metric; NaN if it was missing or not finite.
    """

    steps: Sequence[float]
    epochs: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    def thinned(self, limit: int = MAX_POINTS) -> Curve:
        """Reduce the curve to at most `limit` points, each the average of an interval."""
        if len(self) <= limit:
            return self
        return Curve(*(averages(column, limit) for column in (self.steps, self.epochs, self.seconds, self.values)))


def averages(column: Sequence[float], limit: int) -> list[float]:
    """Average at most `limit` intervals of about equal length; an interval without finite values gives NaN."""
    values = np.asarray(column, dtype=np.float64)
    starts = np.arange(min(limit, len(values))) * len(values) // min(limit, len(values))
    known = np.isfinite(values)
    sums, counts = np.add.reduceat(np.where(known, values, 0.0), starts), np.add.reduceat(known.astype(int), starts)
    return [float(total / count) if count else math.nan for total, count in zip(sums, counts, strict=True)]


@dataclass(frozen=True)
class Run:
    """The records of one run. Shares (top1, top5, data_wait) are between 0 and 1.

    Args:
        name: Name in legends, distinct within a report.
        start: The `run` record of the newest session; empty if there is none.
        workers: Number of workers of each session, in order.
        epochs: For each metric and split, one point per epoch or evaluation.
        steps: For each metric, one point per step record, thinned.
        stragglers: The newest records of ranks that slow the others down.
        measured: Its steps, for an explanation of what bounds them; None if their times are unknown.
        stopped: Whether the run was stopped early on request.
        reached_goal: Whether the run reached its target accuracy.
        joules: The energy of all sessions; `joules_per_sample` is that of training steps.
        not_counted: Which energy is not counted, and why.
        metrics: The file of its records.
    """

    path: Path
    name: str
    start: Mapping[str, Any] = field(default_factory=dict)
    workers: Sequence[int] = ()
    epochs: Mapping[tuple[str, Split], Curve] = field(default_factory=dict)
    steps: Mapping[str, Curve] = field(default_factory=dict)
    stragglers: Sequence[StragglerRecord] = ()
    measured: MeasuredStep | None = None
    planned_epochs: int | None = None
    stopped: bool = False
    reached_goal: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    joules: float | None = None
    joules_per_sample: float | None = None
    not_counted: Sequence[str] = ()
    metrics: Path = Path()

    @property
    def steady_workers(self) -> int | None:
        """The number of workers, if it was the same in all sessions."""
        return self.workers[0] if self.workers and len(set(self.workers)) == 1 else None

    @property
    def data(self) -> str | None:
        return text(self.start, "data") or text(self.config, "data", "dataset")

    @property
    def arch(self) -> str | None:
        return text(self.start, "arch") or text(self.config, "model", "arch")

    @property
    def global_batch(self) -> int | None:
        return whole(self.start, "global_batch") or whole(self.config, "global_batch_size")

    @property
    def precision(self) -> str | None:
        return text(self.config, "numerics", "precision")

    @property
    def label_changes(self) -> str:
        """Changes to the training labels, such as "label smoothing 0.1"; "" if there are none."""
        fields = (("optim", "label_smoothing"), ("augment", "mixup"), ("augment", "cutmix"))
        changes = [
            f"{key.replace('_', ' ')} {value:g}" for part, key in fields if (value := number(self.config, part, key))
        ]
        return " and ".join(changes)

    @property
    def seed(self) -> int | None:
        return whole(self.config, "seed")

    @property
    def machine(self) -> str:
        """The model of the GPUs or the processor; "" if unknown."""
        return machine_of({"device": text(self.config, "device"), "environment": self.environment})

    @property
    def done_epochs(self) -> int | None:
        ends = [curve.epochs[-1] for curve in self.epochs.values() if curve]
        return max((int(end) for end in ends if math.isfinite(end)), default=None)

    @property
    def is_complete(self) -> bool:
        """Whether the run finished all its epochs or reached its target accuracy."""
        return self.reached_goal or (self.planned_epochs is not None and self.done_epochs == self.planned_epochs)

    @property
    def train_seconds(self) -> float | None:
        """Training time over all sessions."""
        curves = [*self.epochs.values(), *self.steps.values()]
        return max((curve.seconds[-1] for curve in curves if curve), default=None)

    @property
    def images_per_second(self) -> float | None:
        """The median over the training epochs, or over the step records if no epoch has finished.

        If the number of workers changed on resume, only the last session counts.
        """
        curves = (self.epochs.get(("images_per_second", "train")), self.steps.get("images_per_second"))
        rates = next((rates for curve in curves if curve and (rates := self._steady_values(curve))), [])
        return median(rates) if rates else None

    @property
    def epoch_seconds(self) -> float | None:
        """The median training time of an epoch, as of the rate."""
        curve = self.epochs.get(("epoch_seconds", "train"))
        return median(seconds) if curve and (seconds := self._steady_values(curve)) else None

    def _steady_values(self, curve: Curve) -> list[float]:
        """Return the finite values of a curve; if the number of workers changed, only those of the last session."""
        resumed = number(self.start, "step") or 0
        first = -math.inf if len(set(self.workers)) < 2 else resumed
        placed = zip(curve.steps, curve.values, strict=True)
        return [value for step, value in placed if step > first and math.isfinite(value)]

    def curve(self, figure: str, split: Split) -> Curve | None:
        """Return a metric over the epochs, or over the steps while training has fewer than two epochs."""
        by_epoch = self.epochs.get((figure, split))
        if split == "train" and (by_epoch is None or len(by_epoch) < 2):
            return self.steps.get(figure) or by_epoch
        return by_epoch

    def curve_of_steps(self, figure: str) -> Curve | None:
        """Return a training metric over the steps, or over the epochs if the step records lack it."""
        return self.steps.get(figure) or self.epochs.get((figure, "train"))

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration without the seed and the run folder; empty if unknown."""
        return {key: value for key, value in self.config.items() if key not in ("seed", "run")}

    def option(self, part: str, key: str) -> str | None:
        return text(self.config, part, key)


# Names contain the settings in _FIRST that differ between runs; those in _THEN are added only where names are equal.
_FIRST: Sequence[Callable[[Run], str | None]] = (
    lambda run: run.arch,
    lambda run: describe_workers(run.workers) if run.workers else None,
    lambda run: f"batch {run.global_batch:,}" if run.global_batch else None,
    lambda run: run.precision,
)
_THEN: Sequence[Callable[[Run], str | None]] = (
    lambda run: run.option("optim", "optimizer"),
    lambda run: f"peak rate {rate:.3g}" if (rate := number(run.start, "peak_lr")) else None,
    lambda run: run.option("parallel", "strategy"),
    lambda run: f"compress {how}" if (how := run.option("parallel", "compress")) else None,
    lambda run: f"{run.planned_epochs} epochs" if run.planned_epochs else None,
    lambda run: f"seed {run.seed}" if run.seed is not None else None,
    lambda run: run.path.resolve().name,
    lambda run: run.path.resolve().parent.name,
)


def by_data_set(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by data set. If there is only one data set, runs without a recorded data set are counted to it."""
    known = {run.data for run in runs if run.data}
    other = known.pop() if len(known) == 1 else "data set not recorded"
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.data or other, []).append(run)
    return groups


def shared_settings(runs: Sequence[Run]) -> str:
    """Describe the settings that all runs of one data set share, in a sentence; "" if none is known."""
    shared, is_complete = [], True
    for describe in (lambda run: run.data, *_FIRST):
        values = [describe(run) for run in runs]
        known = {value for value in values if value}
        if len(known) == 1:
            shared.append(known.pop())
            is_complete = is_complete and None not in values
    subject = "All runs" if len(runs) > 1 else "This run"
    return f"{subject}{'' if is_complete else ', as far as recorded'}: {', '.join(shared)}." if shared else ""


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run of one data set: its folder's name if it is the only run or has no known settings."""
    if len(runs) < 2:
        return [run.name for run in runs]
    first, then = ([[describe(run) or "" for run in runs] for describe in kinds] for kinds in (_FIRST, _THEN))
    differing = [column for column in first if len({*column} - {""}) > 1]
    names = [", ".join(filter(None, row)) for row in zip(*differing, strict=True)] or [""] * len(runs)
    return numbered([name or run.name for name, run in zip(told_apart(names, *then), runs, strict=True)])


def describe_workers(workers: Sequence[int]) -> str:
    """Describe the numbers of workers of a run's sessions: "2 workers", or "2 → 4 workers" if they changed."""
    counts = [count for index, count in enumerate(workers) if index == 0 or count != workers[index - 1]]
    return " → ".join(map(str, counts)) + (" worker" if counts == [1] else " workers")
