"""Reading run folders (docs/run-folder.md), also of runs that still go on and of runs that were cut short."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.records import read_records
from lockstep.report.fields import number, text, whole
from lockstep.report.run import Run, Split
from lockstep.report.run_curve import Curve

METRICS = "metrics.jsonl"
EPOCH_FIGURES = ("loss", "top1", "top5", "images_per_second", "data_wait", "epoch_seconds")
STEP_FIGURES = ("loss", "top1", "top5", "images_per_second", "data_wait", "lr", "loss_scale", "skipped_steps")
_CHANGING = ("loss_scale", "skipped_steps")  # their changes matter, averages would hide them


def read_run(metrics: Path, warn: Callable[[str], None]) -> Run | None:
    """Read a run's records, configuration and environment; what is missing is said and left out.

    Args:
        metrics: The run's metrics.jsonl.
        warn: Told what was passed over.

    Returns:
        None if there is no record of a run.
    """
    reader = _Reader()
    damaged: list[int] = []
    try:
        for record in read_records(metrics, damaged.append):
            reader.take(record)
    except OSError as error:
        warn(f"{metrics} cannot be read: {error.strerror or error}")
        return None
    if damaged:
        warn(describe_damage(metrics, damaged))
    if reader.incomplete:
        warn(f"{metrics}: {reader.incomplete} records lack step or time_seconds and were passed over")
    if not reader.known:
        warn(f"{metrics} has no records of a run yet; passed over")
        return None
    folder = metrics.parent
    return reader.run(folder, _environment(folder, warn), _config(folder, warn))


def describe_damage(path: Path, lines: list[int]) -> str:
    """What to say of lines that are no whole records."""
    count = f"{len(lines)} lines that are no whole records were" if len(lines) > 1 else "a line that is no record was"
    where = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    return f"{path}: {count} passed over (line {where})"


class _Reader:
    """Gathers records into columns; one pass, so that long runs are read at once."""

    def __init__(self) -> None:
        self.known = self.incomplete = 0
        self._sessions: list[Mapping[str, Any]] = []
        self._epochs: dict[tuple[str, Split], _Columns] = defaultdict(_Columns)
        self._steps: dict[str, _Columns] = defaultdict(_Columns)
        self._planned: int | None = None
        self._last_kind: str | None = None
        self._reached_goal = False

    def take(self, record: Mapping[str, Any]) -> None:
        kind = text(record, "kind")
        if kind not in ("run", "step", "epoch", "desired", "stop"):
            return
        self.known += 1
        self._last_kind = kind
        if kind == "run":
            self._sessions.append(record)
        elif kind == "desired":
            self._reached_goal = True
        elif kind != "stop":
            self._take_figures(kind, record)

    def _take_figures(self, kind: str, record: Mapping[str, Any]) -> None:
        step, seconds = number(record, "step"), number(record, "time_seconds")
        if step is None or seconds is None:
            self.incomplete += 1
        elif kind == "step":
            for figure in STEP_FIGURES:
                if figure in record:
                    self._steps[figure].add(step, self._epochs_at(step, record), seconds, number(record, figure))
        else:
            self._planned = whole(record, "epochs") or self._planned
            split: Split = "val" if record.get("split") == "val" else "train"
            epoch = number(record, "epoch")
            for figure in EPOCH_FIGURES:
                if figure in record:
                    place = epoch if epoch is not None else self._epochs_at(step, record)
                    self._epochs[figure, split].add(step, place, seconds, number(record, figure))

    def _epochs_at(self, step: float, record: Mapping[str, Any]) -> float:
        """Epochs done after a step, fractions included."""
        an_epoch = number(self._sessions[-1], "steps_per_epoch") if self._sessions else None
        return step / an_epoch if an_epoch else number(record, "epoch") or math.nan

    def run(self, folder: Path, environment: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
        steps = {figure: columns.curve() for figure, columns in self._steps.items()}
        return Run(
            path=folder,
            name=folder.resolve().name,
            start=self._sessions[-1] if self._sessions else {},
            workers=[count for session in self._sessions if (count := whole(session, "workers"))],
            epochs={key: columns.curve() for key, columns in self._epochs.items()},
            steps={key: curve.changes() if key in _CHANGING else curve.thinned() for key, curve in steps.items()},
            planned_epochs=self._planned or whole(config, "epochs"),
            stopped=self._last_kind == "stop",
            reached_goal=self._reached_goal,
            environment=environment,
            config=config,
        )


class _Columns:
    """Steps, epochs, seconds and values, as packed numbers."""

    def __init__(self) -> None:
        self._columns = tuple(array("d") for _ in range(4))

    def add(self, step: float, epochs: float, seconds: float, value: float | None) -> None:
        row = (step, epochs, seconds, math.nan if value is None else value)
        for column, item in zip(self._columns, row, strict=True):
            column.append(item)

    def curve(self) -> Curve:
        return Curve(*self._columns)


def _environment(folder: Path, warn: Callable[[str], None]) -> Mapping[str, Any]:
    path = folder / "environment.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        warn(f"{folder} has no environment.json: machine and versions of this run are unknown")
        return {}
    except (OSError, ValueError) as error:
        warn(f"{path} cannot be read: {_reason(error)}")
        return {}
    return facts if isinstance(facts, dict) else {}


def _config(folder: Path, warn: Callable[[str], None]) -> Mapping[str, Any]:
    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        warn(f"{folder} has no config.yaml: precision, seed and other settings of this run are unknown")
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        warn(f"{path} cannot be read: {_reason(error)}")
        return {}
    return config if isinstance(config, dict) else {}


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), type(error).__name__)
