"""Find the runs and studies for a report in the paths that the user passes, and read them.

docs/reference/run-folder.md describes a run's files. Runs may be running or interrupted. Missing or damaged inputs give
warnings. It is an error only if no path has any records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import ConfigError, first_line, plural
from lockstep.files.jsonl import read_records, whole
from lockstep.files.metric_records import AXES, EPOCH_FIGURES, STEP_FIGURES, Columns, MetricRecords
from lockstep.files.untrusted import read_json, read_yaml
from lockstep.report.read_steps import measured_in
from lockstep.report.run import Curve, Run, by_data_set, distinct_names
from lockstep.report.worker_records import RunRecords

DEEPEST = 4  # levels of folders below a path
SKIPPED = ("checkpoints", "logs", "io")  # folders of a run without metrics
RUN_KINDS = ("run", "step", "epoch")
METRICS = "metrics.jsonl"
BY_STEPS, BY_SECONDS = ("loss", "top1", "top5"), ("images_per_second", "data_wait")  # what means are weighted by
TOLERANCE = 1e-9  # of a number of epochs that is a quotient


@dataclass(frozen=True)
class Material:
    """The inputs of a report.

    Args:
        runs: Runs, sorted by data set, then in the order of the paths; names are distinct within a data set.
        studies: The records of all studies, in the order of the paths and of the files.
        warnings: Missing, damaged or skipped inputs, one line each.
    """

    runs: Sequence[Run] = ()
    studies: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[str] = ()

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.studies if record["kind"] == kind]


def gather(paths: Iterable[Path], purpose: str = "report") -> Material:
    """Read runs and studies from run folders, .jsonl files, and folders of these.

    Raises:
        ConfigError: No path has any records; the message gives the reason for each path.
    """
    finder = _Finder()
    for path in paths:
        finder.search(path)
    if not finder.runs and not finder.studies:
        raise ConfigError(
            f"nothing to {purpose}: " + "; ".join(finder.warnings) + "; docs/howto/report.md lists what is read"
        )
    runs = [
        replace(run, name=name)
        for group in by_data_set(finder.runs).values()
        for run, name in zip(group, distinct_names(group), strict=True)
    ]
    return Material(runs, finder.studies, finder.warnings)


class _Finder:
    """Searches paths for runs and studies and reads each of them once."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.studies: list[Mapping[str, Any]] = []
        self.warnings: list[str] = []
        self._warn = self.warnings.append
        self._seen: set[Path] = set()

    def search(self, path: Path) -> None:
        warned = len(self.warnings)
        files = list(self._files_in(path)) if os.path.isdir(path) else [path]
        for file in files:
            try:
                self._read_file(file)
            except FileNotFoundError:
                self._warn(f"{file} does not exist")
            except OSError as error:
                self._warn_of(error, file)
        if not files and len(self.warnings) == warned:
            self._warn(f"{path}: skipped, as it has no {METRICS} and no .jsonl files")

    def _warn_of(self, error: OSError, path: Path | None = None) -> None:
        self._warn(f"cannot read {path or error.filename}: {error.strerror or error}")

    def _files_in(self, folder: Path) -> Iterator[Path]:
        """Yield the files of records in a folder and those below it; a run has no others than its metrics."""
        for place, folders, names in os.walk(folder, onerror=self._warn_of, followlinks=True):
            below = len(Path(place).relative_to(folder).parts) < DEEPEST and METRICS not in names
            folders[:] = sorted(each for each in folders if below and each not in SKIPPED and not each.startswith("."))
            found = [METRICS] if METRICS in names else sorted(name for name in names if name.endswith(".jsonl"))
            yield from (path for name in found if (path := Path(place, name)).is_file())

    def _read_file(self, path: Path) -> None:
        if path.name == METRICS or next(read_records(path), {}).get("kind") in RUN_KINDS:
            self._read(path, self._read_run_folder)
        else:
            self._read(path, lambda path: self.studies.extend(read_study(path, self._warn)))

    def _read(self, path: Path, read: Callable[[Path], None]) -> None:
        if path.resolve() not in self._seen:
            self._seen.add(path.resolve())
            read(path)

    def _read_run_folder(self, metrics: Path) -> None:
        if run := read_run(metrics, self._warn):
            self.runs.append(run)


KINDS = ("scaling", "batch", "loading")


def read_study(path: Path, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of a study's .jsonl file that the report can draw; `warn` is called once for each problem."""
    found: list[dict[str, Any]] = []
    damaged: list[int] = []
    others = 0  # counted, not kept: the file may be a large data set
    try:
        for record in read_records(path, damaged.append):
            if record.get("kind") in KINDS:
                found.append(record)
            else:
                others += 1
    except OSError as error:
        warn(f"cannot read {path}: {error.strerror or error}")
        return []
    if others:
        warn(f"{path}: skipped {plural(others, 'record')} of a kind that the report does not draw")
    elif not found:
        warn(f"{path} has no records, which are one JSON object per line (docs/reference/run-folder.md)")
        return []
    if damaged:
        warn(describe_damage(path, damaged))
    return found


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
