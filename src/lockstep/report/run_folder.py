"""Read run folders (docs/reference/run-folder.md), including those of running and interrupted runs."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import first_line, plural
from lockstep.files.jsonl import number, read_records, text, whole
from lockstep.files.untrusted import read_json, read_yaml
from lockstep.report.run import Curve, Run, Split
from lockstep.report.worker_records import StragglerRecord, WorkerPhases, read_straggler

METRICS = "metrics.jsonl"
EPOCH_FIGURES = ("loss", "top1", "top5", "images_per_second", "data_wait", "epoch_seconds")
STEP_FIGURES = ("loss", "top1", "top5", "images_per_second", "data_wait", "lr", "loss_scale", "skipped_steps")
MAX_STRAGGLERS = 100  # per run


def read_run(metrics: Path, warn: Callable[[str], None]) -> Run | None:
    """Read a run's records, configuration and environment; missing or damaged parts are skipped with a warning.

    Args:
        metrics: The run's metrics.jsonl.
        warn: Called with one line for each skipped part.

    Returns:
        The run, or None if the file is unreadable or has no records of a run.
    """
    reader = _Reader()
    damaged: list[int] = []
    try:
        for record in read_records(metrics, damaged.append):
            reader.take(record)
    except OSError as error:
        warn(f"cannot read {metrics}: {error.strerror or error}")
        return None
    if damaged:
        warn(describe_damage(metrics, damaged))
    if reader.incomplete:
        warn(f"{metrics}: skipped {plural(reader.incomplete, 'record')} without step or time_seconds")
    if not reader.known:
        warn(f"{metrics}: skipped, as it has no records of a run yet")
        return None
    folder, environment, config = metrics.parent, dict[str, Any](), dict[str, Any]()
    if not reader.is_of("program"):  # which `lockstep run` has observed
        environment = _facts(folder / "environment.json", read_json, "the machine and versions", warn)
        if not reader.is_of("script"):  # with a loop of its own
            config = _facts(folder / "config.yaml", read_yaml, "the precision, seed and other settings", warn)
    return reader.run(folder, environment, _with_text_keys(config))


def describe_damage(path: Path, lines: list[int]) -> str:
    """Return the warning for damaged lines, given their line numbers."""
    where = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    return f"{path}: skipped {plural(len(lines), 'damaged line')} ({'lines' if len(lines) > 1 else 'line'} {where})"


class _Reader:
    """Collects records into columns, in one pass over the file."""

    def __init__(self) -> None:
        self.known = self.incomplete = 0
        self._sessions: list[Mapping[str, Any]] = []
        self._steps_per_epoch: float | None = None
        self._epochs: dict[Split, _Columns] = {"train": _Columns(EPOCH_FIGURES), "val": _Columns(EPOCH_FIGURES)}
        self._steps = _Columns(STEP_FIGURES)
        self._worker_phases = WorkerPhases()
        self._stragglers: deque[StragglerRecord] = deque(maxlen=MAX_STRAGGLERS)
        self._planned: int | None = None
        self._last_kind: str | None = None
        self._reached_goal = False

    def is_of(self, what: str) -> bool:
        return any(what in session for session in self._sessions)

    def take(self, record: Mapping[str, Any]) -> None:
        kind = text(record, "kind")
        if kind == "straggler" and (straggler := read_straggler(record)):
            self._stragglers.append(straggler)
        if kind not in ("run", "step", "epoch", "desired", "stop"):
            return
        self.known += 1
        self._last_kind = kind
        if kind == "run":
            self._sessions.append(record)
            self._steps_per_epoch = number(record, "steps_per_epoch")
            self._worker_phases.begin_session(record)
        elif kind == "desired":
            self._reached_goal = True
        elif kind != "stop":
            self._take_figures(kind, record)

    def _take_figures(self, kind: str, record: Mapping[str, Any]) -> None:
        step, seconds = number(record, "step"), number(record, "time_seconds")
        epoch = number(record, "epoch")
        if step is None or seconds is None:
            self.incomplete += 1
        elif kind == "step":
            self._steps.add(step, self._epochs_at(step, epoch), seconds, record)
        else:
            self._planned = whole(record, "epochs") or self._planned
            split: Split = "val" if record.get("split") == "val" else "train"
            epochs = epoch if epoch is not None else self._epochs_at(step, epoch)
            self._epochs[split].add(step, epochs, seconds, record)
            if split == "train":
                self._worker_phases.add_epoch(step, record)

    def _epochs_at(self, step: float, epoch: float | None) -> float:
        """Return the epochs done after a step, with fractions if the steps per epoch are known; NaN if unknown."""
        if self._steps_per_epoch:
            return step / self._steps_per_epoch
        return math.nan if epoch is None else epoch

    def run(self, folder: Path, environment: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
        by_split = {split: columns.curves() for split, columns in self._epochs.items()}
        return Run(
            path=folder,
            name=folder.resolve().name,
            start=self._sessions[-1] if self._sessions else {},
            workers=[count for session in self._sessions if (count := whole(session, "workers"))],
            epochs={(figure, split): curve for split, found in by_split.items() for figure, curve in found.items()},
            steps={
                key: curve if key == "skipped_steps" else curve.thinned()  # only the last count is reported
                for key, curve in self._steps.curves().items()
            },
            worker_phases=self._worker_phases.per_step(),
            stragglers=list(self._stragglers),
            planned_epochs=self._planned or whole(config, "epochs"),
            stopped=self._last_kind == "stop",
            reached_goal=self._reached_goal,
            environment=environment,
            config=config,
        )


class _Columns:
    """Steps, epochs, seconds and metrics of all records of one kind, as packed arrays; a missing metric is NaN."""

    def __init__(self, figures: Sequence[str]) -> None:
        self._axes = (array("d"), array("d"), array("d"))
        self._figures = {figure: array("d") for figure in figures}

    def add(self, step: float, epochs: float, seconds: float, record: Mapping[str, Any]) -> None:
        for column, position in zip(self._axes, (step, epochs, seconds), strict=True):
            column.append(position)
        for figure, column in self._figures.items():
            value = number(record, figure)
            column.append(math.nan if value is None else value)

    def curves(self) -> dict[str, Curve]:
        """Return the curve of each metric that any record has."""
        found = ((figure, column) for figure, column in self._figures.items() if any(map(math.isfinite, column)))
        return {figure: Curve(*self._axes, column) for figure, column in found}


def _facts(path: Path, read: Callable[[Path], Any], lost: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the contents of a file of a run; empty, with a warning that `lost` is unknown, if it cannot be read."""
    try:
        facts = read(path)
    except FileNotFoundError:
        warn(f"{path.parent} has no {path.name}: {lost} of this run are unknown")
        return {}
    except (OSError, ValueError) as error:
        warn(f"cannot read {path}: {getattr(error, 'strerror', None) or first_line(error)}")
        return {}
    return facts if isinstance(facts, dict) else {}


def _with_text_keys(value: Any) -> Any:
    """Convert all keys of parsed YAML, such as numbers, to strings."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value
