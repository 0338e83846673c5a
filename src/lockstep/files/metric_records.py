"""The records in a run's metrics.jsonl, taken one by one: for reports, `lockstep watch` and the history of `fit`.

Records may be damaged, foreign or untrusted: values are checked as in `files.jsonl`, and records without a position are
counted and skipped. What a resumed session does again replaces what was recorded before.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from lockstep.files.jsonl import Record, count, mapping, number, plausible, text, texts

Split = Literal["train", "val"]
Position = tuple[float, float, float]  # steps and epochs done, and seconds of training
AXES = ("step", "epochs", "seconds")
KINDS = ("run", "step", "epoch", "desired", "stop", "end")
RATES = ("images_per_second", "steps_per_second")
EPOCH_FIGURES = ("loss", "top1", "top5", "images_per_second", "data_wait", "epoch_seconds", "kilowatt_hours")
STEP_FIGURES = ("loss", "top1", "top5", *RATES, "data_wait", "lr", "loss_scale", "skipped_steps", "unix_time")
JOULES_PER_KWH = 3.6e6
RECENT = 8  # step records in a median for "now", since an epoch's last record may cover only one step


class Columns:
    """Figures of records beside their positions (`AXES`), as packed arrays; NaN: the record lacks the figure.

    Args:
        limit: Maximum number of rows, even; when there are as many, neighboring pairs are averaged. None: no maximum.
    """

    def __init__(self, figures: Sequence[str], limit: int | None = None):
        self._figures, self._limit = figures, limit
        self._columns = {name: array("d") for name in (*AXES, *figures)}
        self._averaged = 1  # records in each row
        self._open: list[Sequence[float]] = []  # records of the next row

    def __getitem__(self, name: str) -> Sequence[float]:
        """Return one value per row. The last row may be an average of fewer records."""
        if not self._open:
            return self._columns[name]
        index = list(self._columns).index(name)
        return [*self._columns[name], _mean([row[index] for row in self._open])]

    def add(self, position: Position, figures: Mapping[str, float]) -> None:
        self._open.append([*position, *(figures.get(name, math.nan) for name in self._figures)])
        if len(self._open) < self._averaged:
            return
        for column, values in zip(self._columns.values(), zip(*self._open, strict=True), strict=True):
            column.append(_mean(values))
        self._open = []
        if len(column) == self._limit:
            for name, column in self._columns.items():
                self._columns[name] = array("d", map(_mean, zip(column[::2], column[1::2], strict=True)))
            self._averaged *= 2

    def cut(self, step: int) -> None:
        """Drop the last rows that are of later steps."""
        self._open = [row for row in self._open if row[0] <= step]
        kept = len(self._columns["step"])
        while kept and self._columns["step"][kept - 1] > step:
            kept -= 1
        for column in self._columns.values():
            del column[kept:]

    def has(self, figure: str) -> bool:
        """Whether any row has the figure."""
        return any(map(math.isfinite, self[figure]))

    def points(self, figure: str, after: float = -math.inf) -> list[tuple[float, float]]:
        """Return (step, value) of the rows after a step that have the figure."""
        rows = list(zip(self["step"], self[figure], strict=True))
        first = next((index for index, (step, _) in enumerate(rows) if step > after), len(rows))
        first += first > 0 and self._averaged > 1  # the first row may be an average over earlier steps, too
        return [(step, value) for step, value in rows[first:] if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def _figures(record: Record, names: Sequence[str]) -> dict[str, float]:
    return {name: value for name in names if (value := plausible(record.get(name))) is not None}


class MetricRecords:
    """The records of a run so far, over all its sessions.

    Args:
        limit: Maximum number of rows of `steps` and of `epochs`; see `Columns`.
    """

    def __init__(self, limit: int | None = None):
        self.taken = self.incomplete = self.step = 0  # records of a run; those without a position; the newest step
        self.time_seconds = self.longest_gap_seconds = 0.0  # of training; between two records of the last session
        self.last_time: float | None = None  # Unix time of the newest record
        self.start: Record = {}  # the `run` record of the last session
        self.workers: list[int] = []  # of each session
        self.steps = Columns(STEP_FIGURES, limit)
        self.epochs: dict[Split, Columns] = {split: Columns(EPOCH_FIGURES, limit) for split in ("train", "val")}
        self.recent: deque[dict[str, float]] = deque(maxlen=RECENT)  # figures of the last session's last steps
        self.end: Record = {}  # how the last session ended: of kind "desired", "stop" or "end"
        self.reached_goal = False  # in any session
        self.planned_epochs: int | None = None
        self.joules: float | None = None  # of all sessions, with those of steps that a later one took again
        self.samples = self.joules_of_samples = 0.0  # of the steps whose energy was counted
        self.not_counted: list[str] = []

    def take_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Add a record; records of other kinds are ignored."""
        kind = text(record, "kind")
        if kind == "energy":
            self._take_energy(record)
        if kind not in KINDS:
            return
        self.taken += 1
        self.pass_time(record)
        if kind == "run":
            self.begin_session(record)
        elif kind in ("step", "epoch"):
            self._take_figures(kind, record)
        else:
            self.end = record
            self.reached_goal |= kind == "desired"

    def _take_energy(self, record: Record) -> None:
        self.not_counted += [line for line in texts(record, "unread") if line not in self.not_counted]
        parts = [part for each in mapping(record, "joules").values() if (part := plausible(each)) is not None]
        if parts and (joules := sum(parts)) >= 0:
            self.joules = (self.joules or 0.0) + joules
            if samples := count(record, "samples"):
                self.samples, self.joules_of_samples = self.samples + samples, self.joules_of_samples + joules

    def pass_time(self, record: Record) -> None:
        """Note the position and the time of a record."""
        step, unix_time = count(record, "step"), number(record, "unix_time")
        self.step = self.step if step is None else step
        self.time_seconds = number(record, "time_seconds") or self.time_seconds
        if unix_time is not None:
            gap = unix_time - self.last_time if self.last_time is not None else 0.0
            self.longest_gap_seconds, self.last_time = max(self.longest_gap_seconds, gap), unix_time

    def begin_session(self, record: Record) -> None:
        """Take a `run` record; figures of later steps are dropped, as the session takes these steps again."""
        self.start, self.end, self.longest_gap_seconds = record, {}, 0.0
        self.recent.clear()
        if workers := count(record, "workers"):
            self.workers.append(workers)
        if (step := count(record, "step")) is not None:
            for columns in (self.steps, *self.epochs.values()):
                columns.cut(step)

    def _take_figures(self, kind: str, record: Record) -> None:
        step, seconds = count(record, "step"), number(record, "time_seconds")
        epoch, per_epoch = number(record, "epoch"), self.steps_per_epoch
        if step is None or seconds is None:
            self.incomplete += 1
            return
        if per_epoch and (kind == "step" or epoch is None):
            epoch = step / per_epoch
        position = step, math.nan if epoch is None else epoch, seconds
        if kind == "step":
            self.take_step(position, record)
        else:
            self.planned_epochs = count(record, "epochs") or self.planned_epochs
            self.take_epoch("val" if record.get("split") == "val" else "train", position, record)

    def take_step(self, position: Position, record: Record) -> None:
        self.recent.append(_figures(record, STEP_FIGURES))
        self.steps.add(position, self.recent[-1])

    def take_epoch(self, split: Split, position: Position, record: Record) -> None:
        self.epochs[split].add(position, _figures(record, EPOCH_FIGURES))

    @property
    def steps_per_epoch(self) -> int | None:
        return count(self.start, "steps_per_epoch") or None
