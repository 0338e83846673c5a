"""The batch study: throughput and memory by batch size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lockstep.files.fields import Record, number, spread, text, whole
from lockstep.report.document import Chart, Line, Mark, Scale, Section
from lockstep.report.read.run_labels import by_label
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import rate_scale
from lockstep.report.scaling_series import machine_of

ONE_JOB = ("job", "workers", "nodes", "memory_limit")


def build(material: Material) -> Section | None:
    found = _searches(material)
    if not found:
        return None
    jobs = by_label(found)
    throughput = [line for color, item in enumerate(jobs.items()) if (line := _throughput(color, *item)).x]
    memory = [line for color, item in enumerate(jobs.items()) for line in _memory(color, *item) if line.x]
    marks = _misfits(jobs)
    parts = []
    if throughput:
        title, label = "Throughput by batch size", "throughput (images/s)"
        note = "Medians; bands show the quartiles over blocks of steps."
        parts.append(_chart("throughput", title, label, throughput, rate_scale(throughput), marks, note))
    if memory:
        title, label = "Memory by batch size", "peak memory per worker (GB)"
        parts.append(_chart("memory", title, label, memory, "linear", marks, "Dashed: the limit."))
    return Section("Batch size", "\n".join(_verdicts(jobs)), parts)


def _chart(
    key: str, title: str, label: str, lines: Sequence[Line], scale: Scale, marks: Sequence[Mark], note: str
) -> Chart:
    x_label = "batch size per worker"
    return Chart(f"batch-{key}", title, x_label, label, lines, "log2", scale, marks, note, from_zero=True)


def _searches(material: Material) -> dict[tuple[str, str], dict[int, Record]]:
    """Return each job's newest record per batch size, under a label and a machine.

    Records of batches that do not fit have no machine; they count for each machine on which the job was measured.
    """
    jobs: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in material.of_kind("batch"):
        if (whole(record, "batch") or 0) > 0:
            jobs[tuple(str(record.get(name)) for name in ONE_JOB)].append(record)
    found: dict[tuple[str, str], dict[int, Record]] = {}
    for records in jobs.values():
        for machine in dict.fromkeys(machine_of(record) for record in records if _fits(record)) or [""]:
            own = [record for record in records if not _fits(record) or machine_of(record) == machine]
            label = _label(next(filter(_fits, own), own[0]))
            if (label, machine) in found:  # a job with other flags
                label = f"{label}, job {text(own[0], 'job') or 'unknown'}"
            found.setdefault((label, machine), {}).update({whole(record, "batch") or 0: record for record in own})
    return found


def _label(record: Record) -> str:
    workers, precision, limit = whole(record, "workers") or 1, text(record, "precision"), text(record, "memory_limit")
    name = f"{text(record, 'arch') or 'a network'} on {text(record, 'data') or 'data'}"
    parts = (precision, f"{workers} workers" if workers > 1 else None, f"memory limit {limit}" if limit else None)
    return ", ".join([name, *(part for part in parts if part)])


def _fits(record: Record) -> bool:
    return record.get("fits") is not False


def _fitting(records: Mapping[int, Record]) -> list[tuple[int, Record]]:
    return [(batch, records[batch]) for batch in sorted(records) if _fits(records[batch])]


def _throughput(color: int, label: str, records: Mapping[int, Record]) -> Line:
    found = [(batch, spread(record, "images_per_second_spread")) for batch, record in _fitting(records)]
    known = [(batch, rates) for batch, rates in found if rates]
    low, middle, high = ([rates[index] for _, rates in known] for index in range(3))
    return Line(label, [batch for batch, _ in known], middle, low, high, color=color)


def _memory(color: int, label: str, records: Mapping[int, Record]) -> list[Line]:
    found = [(batch, number(record, "peak_memory_bytes")) for batch, record in _fitting(records)]
    known = [(batch, size / 1e9) for batch, size in found if size]
    limits = [limit for record in records.values() if (limit := number(record, "memory_limit_bytes"))]
    x = [batch for batch, _ in known]
    lines = [Line(label, x, [size for _, size in known], color=color)]
    if limits and x:
        most = [min(limits) / 1e9] * len(x)
        lines.append(Line(f"limit, {label}", x, most, look="dashed", color=None))
    return lines


def _misfits(jobs: Mapping[str, Mapping[int, Record]]) -> list[Mark]:
    """Mark the smallest batch of each job that does not fit."""
    smallest = [min((b for b, record in job.items() if not _fits(record)), default=None) for job in jobs.values()]
    return [Mark(batch, f"{batch:,} does not fit") for batch in sorted({batch for batch in smallest if batch})]


def _verdicts(jobs: Mapping[str, Mapping[int, Record]]) -> Sequence[str]:
    lines = []
    for label, records in jobs.items():
        fitting = _fitting(records)
        misfit = min((batch for batch, record in records.items() if not _fits(record)), default=None)
        if fitting and misfit:
            why = text(records[misfit], "why") or "no reason recorded"
            lines.append(f"{label}: the largest batch that fits is {fitting[-1][0]:,}; {misfit:,} does not ({why}).")
    return lines
