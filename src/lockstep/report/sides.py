"""Read the two sides of a comparison: runs, records of observed programs, or scaling studies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.diagnosis.phases import STEP_PARTS, parts_of
from lockstep.errors import ConfigError, plural
from lockstep.files.jsonl import Record, mapping, number, read_records
from lockstep.files.metric_records import Position
from lockstep.report.comparison import WHOLE, StepTimes
from lockstep.report.scaling_series import LARGEST, SMALLEST, problem_of, rate_of
from lockstep.report.sources import Material, gather
from lockstep.report.worker_records import RunRecords, phase_medians

ABOUT_RUN = ("workers", "hosts", "arch", "data", "parameters", "global_batch", "program")
ABOUT_STUDY = ("label", "flags", "nodes", "threads", "device", "gpu", "steps", "warmup_steps", "batch_system", "source")
NOT_COMPARED = ("time", "command", "folder", "workers", "load_average")  # of an environment
MAX_CHARACTERS = 200  # of a value


class Side(NamedTuple):
    """The records of runs by what was measured ("", or "2 workers, weak scaling"), and facts about the first run."""

    runs: Mapping[str, list[list[StepTimes]]]
    facts: Mapping[str, str]


def read_sides(paths: Sequence[Path], warn: Callable[[str], None]) -> list[Side]:
    """Read both sides of a comparison.

    Raises:
        ConfigError: A side has no throughput of steps, or several jobs, or the sides have nothing in common.
    """
    material = [gather([path], "compare") for path in paths]
    for warning in (warning for side in material for warning in side.warnings):
        warn(warning)
    for read in (_of_runs, _of_studies):
        sides = [read(side) for side in material]
        if sides[0].runs.keys() & sides[1].runs.keys():
            return sides
    needed = "compare two runs with records of steps, or two studies with the same -np and --mode"
    raise ConfigError(f"nothing to compare in {paths[0]} and {paths[1]}: {needed}")


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the facts that differ; "-" where a side lacks them."""
    return {name: (a.get(name, "-"), b.get(name, "-")) for name in {**a, **b} if a.get(name) != b.get(name)}


def _facts(about: Record, names: Sequence[str], settings: Record, environment: Record) -> dict[str, str]:
    machine = {name: value for name, value in environment.items() if name not in NOT_COMPARED}
    return dict(_texts({**{name: about[name] for name in names if name in about}, **settings, **machine}))


def _texts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of nested values."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _texts(value, "" if name == "packages" else f"{prefix}{name}.")
        elif value not in (None, "", []):
            text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            yield f"{prefix}{name}", text[:MAX_CHARACTERS]


def _of_runs(material: Material) -> Side:
    facts = [_facts(run.start, ABOUT_RUN, run.settings(), run.environment) for run in material.runs]
    runs: list[list[StepTimes]] = []
    for run in material.runs:
        _refuse_other_jobs(run.start, material.runs[0].start, ("workers", "arch", "data", "global_batch"), "runs")
        records = _StepRecords()
        records.take_all(read_records(run.metrics))
        runs += [found] if (found := records.times[1:] or records.times) else []  # the first one includes a start
    return Side({"": runs} if runs else {}, facts[0] if facts else {})


def _refuse_other_jobs(record: Record, first: Record, names: Sequence[str], what: str) -> None:
    if other := [name for name in names if record.get(name) != first.get(name)]:
        values = " and ".join(str(each.get(other[0])) for each in (first, record))
        raise ConfigError(f"one side has {what} of several jobs ({other[0]}: {values}); pass those of one job")


class _StepRecords(RunRecords):
    """The times in the step records of the last sessions with the same number of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[StepTimes] = []

    def begin_session(self, record: Record) -> None:
        super().begin_session(record)
        self.times = self.times if len(set(self.workers[-2:])) == 1 else []

    def take_step(self, position: Position, record: Record) -> None:
        super().take_step(position, record)
        phases = phase_medians(record)
        self.times += times_of(record, number(self.start, "global_batch"), parts_of(phases) if phases else {})


def times_of(record: Record, batch: float | None, parts: Mapping[str, float]) -> list[StepTimes]:
    """Return the times in a record, if it has a throughput; if only that of samples, those of a sample."""
    samples = rate_of({**record, "steps_per_second": None})
    steps = number(record, "steps_per_second") or (samples / batch if samples and batch else None)
    parts, steps = (parts, steps) if steps else ({}, samples)
    if not steps or not SMALLEST <= steps <= LARGEST:
        return []
    unix_time, busy_cores = number(record, "unix_time") or 0.0, number(record, "busy_cores")
    return [StepTimes({**parts, WHOLE: 1 / steps}, (samples or 0.0) / steps, unix_time, busy_cores)]


def _of_studies(material: Material) -> Side:
    records = [record for record in material.of_kind("scaling") if not problem_of(record)]
    runs: dict[str, list[list[StepTimes]]] = {}
    jobs: dict[str, Record] = {}  # by mode
    for record in records:
        parts = {name: seconds for name in STEP_PARTS if (seconds := number(record, "split_seconds", name) or 0.0) > 0}
        times = times_of(record, number(record, "global_batch"), parts)
        for mode in record["modes"] if times else ():
            _refuse_other_jobs(record, jobs.setdefault(mode, record), ("label", "job", "source"), f"{mode} scaling")
            runs.setdefault(f"{plural(record['workers'], 'worker')}, {mode} scaling", []).append(times)
    return Side(runs, _facts(records[0], ABOUT_STUDY, {}, mapping(records[0], "environment")) if records else {})
