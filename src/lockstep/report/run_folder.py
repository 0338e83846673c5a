"""Read run folders (docs/reference/run-folder.md), including those of running and interrupted runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import first_line, plural
from lockstep.files.jsonl import read_records, whole
from lockstep.files.metric_records import AXES, EPOCH_FIGURES, STEP_FIGURES, Columns, MetricRecords
from lockstep.files.untrusted import read_json, read_yaml
from lockstep.report.read_steps import measured_in
from lockstep.report.run import Curve, Run
from lockstep.report.worker_records import RunRecords

METRICS = "metrics.jsonl"
BY_STEPS, BY_SECONDS = ("loss", "top1", "top5"), ("images_per_second", "data_wait")  # what means are weighted by
TOLERANCE = 1e-9  # of a number of epochs that is a quotient


def read_run(metrics: Path, warn: Callable[[str], None]) -> Run | None:
    """Read a run's records, configuration and environment; missing or damaged parts are skipped with a warning.

    Args:
        metrics: The run's metrics.jsonl.
        warn: Called with one line for each skipped part.

    Returns:
        The run, or None if the file is unreadable or has no records of a run.
    """
    records, damaged = RunRecords(), list[int]()
    try:
        records.take_all(read_records(metrics, damaged.append))
    except OSError as error:
        warn(f"cannot read {metrics}: {error.strerror or error}")
        return None
    if damaged:
        warn(describe_damage(metrics, damaged))
    if records.incomplete:
        warn(f"{metrics}: skipped {plural(records.incomplete, 'record')} without step or time_seconds")
    if not records.taken:
        warn(f"{metrics}: skipped, as it has no records of a run yet")
        return None
    folder, environment, config = metrics.parent, dict[str, Any](), dict[str, Any]()
    if "program" not in records.start:
        environment = _facts(folder / "environment.json", read_json, "the machine and versions", warn)
        if "script" not in records.start:
            config = _facts(folder / "config.yaml", read_yaml, "the precision, seed and other settings", warn)
    return _run(metrics, records, environment, _with_text_keys(config))


def describe_damage(path: Path, lines: list[int]) -> str:
    """Return the warning for damaged lines, given their line numbers."""
    where = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
    return f"{path}: skipped {plural(len(lines), 'damaged line')} ({'lines' if len(lines) > 1 else 'line'} {where})"


def _run(metrics: Path, records: RunRecords, environment: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
    steps, by_split = _curves(records.steps, STEP_FIGURES), dict(records.epochs)
    if "script" in records.start:
        by_split["train"] = epochs_of_steps(records)  # such a loop records no training epochs
    epochs = {split: _curves(columns, EPOCH_FIGURES) for split, columns in by_split.items()}
    return Run(
        path=metrics.parent,
        name=metrics.parent.resolve().name,
        metrics=metrics,
        start=records.start,
        workers=records.workers,
        epochs={(figure, split): curve for split, curves in epochs.items() for figure, curve in curves.items()},
        steps={
            figure: curve if figure == "skipped_steps" else curve.thinned()  # only the last count is reported
            for figure, curve in steps.items()
        },
        stragglers=list(records.stragglers),
        measured=measured_in(records, config),
        planned_epochs=records.planned_epochs or whole(config, "epochs"),
        stopped=records.end.get("kind") == "stop",
        reached_goal=records.reached_goal,
        environment=environment,
        config=config,
        joules=records.joules,
        joules_per_sample=records.joules_of_samples / records.samples if records.samples else None,
        not_counted=records.not_counted,
    )


def epochs_of_steps(records: MetricRecords) -> Columns:
    """Return the complete training epochs of a user's own loop, which records only evaluations as epochs.

    Each epoch ends with a step record; the figures are means over its step records.
    """
    steps, epochs, seconds = (np.asarray(records.steps[axis], dtype=np.float64) for axis in AXES)
    found, numbers, per_epoch = Columns(EPOCH_FIGURES), np.ceil(epochs - TOLERANCE), records.steps_per_epoch
    if not len(steps):
        return found
    starts = np.flatnonzero(np.diff(numbers, prepend=np.nan) != 0)
    ends = np.append(starts[1:], len(steps)) - 1
    step_counts, durations = np.diff(steps, prepend=0.0), np.diff(seconds, prepend=0.0)
    columns = {"epoch_seconds": np.add.reduceat(durations, starts)}
    for names, weights in ((BY_STEPS, step_counts), (BY_SECONDS, durations)):
        columns |= {name: _means(records.steps[name], weights, starts) for name in names}
    for row, end in enumerate(ends):
        is_last = end == ends[-1] and not records.end
        if steps[end] == numbers[end] * per_epoch if per_epoch else not is_last:
            position = float(steps[end]), float(numbers[end]), float(seconds[end])
            found.add(position, {name: float(values[row]) for name, values in columns.items()})
    return found


def _means(column: Sequence[float], weights: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the weighted mean of each group of rows, without missing values; NaN if all are missing."""
    values = np.asarray(column, dtype=np.float64)
    known = np.where(np.isfinite(values), weights, 0.0)
    sums, totals = np.add.reduceat(known * np.nan_to_num(values), starts), np.add.reduceat(known, starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(totals > 0, sums / totals, np.nan)


def _curves(columns: Columns, figures: Sequence[str]) -> dict[str, Curve]:
    """Return the curve of each figure that any record has."""
    steps, epochs, seconds = (columns[axis] for axis in AXES)
    return {figure: Curve(steps, epochs, seconds, columns[figure]) for figure in figures if columns.has(figure)}


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
