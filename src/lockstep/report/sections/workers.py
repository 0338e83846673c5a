"""Throughput and training time against workers, from runs that differ in their number of workers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from lockstep.report.document import Chart, Line, Section
from lockstep.report.run import Run
from lockstep.report.sources import Material

ByWorkers = Mapping[int, Sequence[Run]]
_BATCH_KEYS = ("batch_size", "global_batch_size", "accumulate")


def build(material: Material) -> Section | None:
    jobs = _jobs(material.runs)
    rates = _lines(jobs, lambda run: run.images_per_second)
    times = _lines(jobs, lambda run: run.train_seconds if run.is_complete else None)
    note = "Medians over runs of the same settings but for batch and seed; bands reach from the least to the most."
    parts = []
    if rates:
        lines = [*rates, *(_ideal(line) for line in rates)]
        parts.append(_chart("workers-throughput", "Throughput against workers", "throughput (images/s)", lines, note))
    if times:
        parts.append(_chart("workers-time", "Training time against workers", "training time (s)", times, note))
    text = "Ideal lines are what each added worker would give if it were as fast as those of the smallest run."
    return Section("Workers", text, parts) if parts else None


def _chart(key: str, title: str, label: str, lines: Sequence[Line], note: str) -> Chart:
    return Chart(key, title, "workers", label, lines, x_scale="log2", y_scale="log10", note=note)


def _jobs(runs: Sequence[Run]) -> dict[str, ByWorkers]:
    """Runs by what they trained, then by workers."""
    jobs: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.steady_workers:
            settings = {key: value for key, value in run.settings().items() if key not in _BATCH_KEYS}
            key = json.dumps([run.data, run.arch, settings], sort_keys=True, default=str)
            jobs[key][run.steady_workers].append(run)
    several = {key: job for key, job in jobs.items() if len(job) > 1}
    return {_label(job, index, len(several)): job for index, job in enumerate(several.values(), start=1)}


def _label(job: ByWorkers, index: int, jobs: int) -> str:
    first = next(iter(job.values()))[0]
    name = f"{first.arch or 'a network'} on {first.data or 'data'}"
    return f"{name}, {first.precision or 'settings'} ({index})" if jobs > 1 else name


def _lines(jobs: Mapping[str, ByWorkers], figure: Callable[[Run], float | None]) -> list[Line]:
    lines = []
    for color, (label, job) in enumerate(jobs.items()):
        values = {count: [value for run in job[count] if (value := figure(run))] for count in sorted(job)}
        known = {count: found for count, found in values.items() if found}
        if len(known) > 1:
            middle = [median(found) for found in known.values()]
            low, high = [min(found) for found in known.values()], [max(found) for found in known.values()]
            lines.append(Line(label, list(known), middle, low, high, color=color))
    return lines


def _ideal(line: Line) -> Line:
    base = (line.y[0] or 0.0) / line.x[0]
    return Line(f"ideal, {line.name}", line.x, [base * count for count in line.x], look="dashed", color=None)
