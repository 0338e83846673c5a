"""Read the steps that `step_verdict` explains from the records of runs and of scaling studies."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import TYPE_CHECKING, Any

from lockstep.diagnosis.observed_steps import ProgramFacts
from lockstep.diagnosis.phases import RECORDED
from lockstep.files.jsonl import Record, count, mapping, number, numbers, text, texts, whole
from lockstep.report.measured_step import MeasuredStep
from lockstep.report.scaling_series import rate_of
from lockstep.report.step_verdict import StepVerdict, explain
from lockstep.report.worker_records import RunRecords

if TYPE_CHECKING:
    from lockstep.report.run import Run

MIN_RECORDS = 4  # of which the two halves are compared


def measured_in(records: RunRecords, config: Mapping[str, Any] | None = None) -> MeasuredStep | None:
    """Return a run's usual step; None if the records do not show where its time went.

    Args:
        config: Of a run of `lockstep train`.
    """
    hosts, steps = count(records.start, "hosts") or 1, records.step
    if "program" in records.start:
        phases, transfer = _medians(records.intervals), number(records.program_facts, "transfer_seconds")
        totals, facts = [sum(map(sum, each.values())) for each in records.intervals], facts_of(records.program_facts)
    else:
        phases, transfer, steps = records.worker_phases(), None, min(steps, int(records.timed_steps))
        totals = [rate for _, rate in records.steps.points("images_per_second")]
        facts = _facts_in(records, config or {})
    use, links = median(records.gpu_use) if records.gpu_use else None, tuple(records.slow_links)
    found = MeasuredStep(phases, transfer, _difference(totals), len(totals), steps, hosts, facts, use, links)
    return found if phases else None


def _facts_in(records: RunRecords, config: Mapping[str, Any]) -> ProgramFacts:
    parallel = mapping(config, "parallel")
    ways = {"auto": "ddp", "ddp": "ddp", "horovod": "hvd"} if parallel.get("compress") == "none" else {}
    size_bytes = 4 * (count(records.start, "parameters") or 0)
    exchange = ways.get(text(parallel, "strategy") or "", "")
    return ProgramFacts(size_bytes, 4, exchange=exchange, device=text(config, "device") or "auto")


def facts_of(record: Record) -> ProgramFacts:
    """Return the facts in a record; those that are missing or invalid are unknown."""
    found: dict[str, Any] = {}
    for field in fields(ProgramFacts):
        name, known = field.name, field.default
        value = text(record, name) if known == "" else (number if isinstance(known, float) else whole)(record, name)
        if isinstance(value, str) or (value is not None and value >= 0):
            found[name] = value
    return ProgramFacts(**found)


def explain_all(runs: Iterable[Run], studies: Iterable[Record]) -> list[tuple[str, StepVerdict]]:
    """Return the verdicts on runs and scaling studies whose times of steps are known, by name."""
    found = [(run.name, explain(run.measured)) for run in runs if run.measured]
    return [*found, *explain_studies(studies).items()]


def explain_studies(records: Iterable[Record]) -> dict[str, StepVerdict]:
    """Return the verdict on each job and mode of scaling studies, with the largest number of workers, by name."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.get("kind") == "scaling" and mapping(record, "phase_seconds") and count(record, "workers"):
            for mode in texts(record, "modes"):
                key = text(record, "job") or "", text(record, "label") or "", mode
                groups.setdefault(key, []).append(record)
    found = {}
    for (_, label, mode), group in groups.items():
        workers = max(count(record, "workers") or 0 for record in group)
        if measured := _of_repeats([record for record in group if count(record, "workers") == workers], workers):
            found[f"{label}, {mode} scaling, {workers} workers"] = explain(measured)
    return found


def _of_repeats(repeats: Sequence[Record], workers: int) -> MeasuredStep | None:
    by_rank: list[dict[str, list[float]]] = [
        {phase: seconds for phase in RECORDED if (seconds := numbers(mapping(each, "phase_seconds"), phase, workers))}
        for each in repeats
    ]
    rates = [rate for each in repeats if (rate := rate_of(each))]
    if not all(by_rank) or not rates:
        return None
    used = [use for each in repeats if (use := number(each, "utilization")) is not None]
    transfers = [waited for each in repeats if (waited := number(each, "transfer_seconds")) is not None]
    return MeasuredStep(
        _medians(by_rank),
        median(transfers) if transfers else None,
        max(rates) / min(rates) - 1,
        len(rates),
        sum(count(each, "measured_steps") or 0 for each in repeats),
        count(repeats[-1], "nodes") or 1,
        facts_of(mapping(repeats[-1], "program")),
        median(used) if used else None,
    )


def _medians(intervals: Collection[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the median of each rank's seconds in each phase."""
    phases = {phase: len(seconds) for each in intervals for phase, seconds in each.items()}
    return {
        phase: [median(each[phase][rank] if phase in each else 0.0 for each in intervals) for rank in range(workers)]
        for phase, workers in phases.items()
    }


def _difference(values: Sequence[float]) -> float:
    """Return by which share the medians of the two halves differ; infinity for too few values."""
    if len(values) < MIN_RECORDS:
        return math.inf
    middle = len(values) // 2
    first, second = median(values[:middle]), median(values[middle:])
    return max(first, second) / min(first, second) - 1 if min(first, second) > 0 else 0.0
