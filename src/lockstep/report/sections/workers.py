"""Throughput and training time against the number of workers, from runs with different numbers of workers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from lockstep.report.document import Chart, Line, Section
from lockstep.report.read.run import Run
from lockstep.report.read.run_labels import numbered
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import ideal_line

ByWorkers = Mapping[int, Sequence[Run]]
_BATCH_KEYS = ("batch_size", "global_batch_size", "accumulate")


def build(material: Material) -> Section | None:
    jobs = _jobs(material.runs)
    rates = _lines(jobs, lambda run: run.images_per_second)
    times = _lines(jobs, lambda run: run.train_seconds if run.is_complete else None)
    note = (
        "Medians over runs that differ only in their seed. All runs of a line have the same global batch size (strong "
        "scaling) or the same batch size per worker (weak scaling); bands show the full range."
    )
    parts = []
    if rates:
        lines = [*rates, *(_ideal(line, len(rates)) for line in rates)]
        parts.append(_chart("workers-throughput", "Throughput against workers", "throughput (images/s)", lines, note))
    if times:
        parts.append(_chart("workers-time", "Training time against workers", "training time (s)", times, note))
    text = "Ideal lines assume the smallest run's throughput per worker."
    return Section("Workers", text, parts) if parts else None


def _chart(key: str, title: str, label: str, lines: Sequence[Line], note: str) -> Chart:
    return Chart(key, title, "workers", label, lines, x_scale="log2", y_scale="log10", note=note)


def _jobs(runs: Sequence[Run]) -> dict[str, ByWorkers]:
    """Group runs by settings and batch size, then by workers; a run may belong to both strong and weak scaling."""
    jobs: dict[tuple[str, str], dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.steady_workers and run.global_batch:
            settings = {key: value for key, value in run.settings().items() if key not in _BATCH_KEYS}
            key = json.dumps([run.data, run.arch, settings, run.machine], sort_keys=True, default=str)
            for share in (_strong(run), _weak(run)):
                jobs[key, share][run.steady_workers].append(run)
    several = [(share, job) for (_, share), job in jobs.items() if len(job) > 1]
    return dict(zip(_labels(several), (job for _, job in several), strict=True))


def _strong(run: Run) -> str:
    return f"global batch {run.global_batch:,}"


def _weak(run: Run) -> str:
    return f"batch {(run.global_batch or 0) / (run.steady_workers or 1):,.10g} per worker"


def _labels(jobs: Iterable[tuple[str, ByWorkers]]) -> list[str]:
    """Return labels of network, data and batch; precision and machine are added where labels would be equal."""
    firsts = [(share, next(iter(job.values()))[0]) for share, job in jobs]
    names = [f"{run.arch or 'a network'} on {run.data or 'data'}, {share}" for share, run in firsts]
    for values in ([run.precision or "" for _, run in firsts], [run.machine for _, run in firsts]):
        alike: dict[str, set[str]] = defaultdict(set)
        for name, value in zip(names, values, strict=True):
            alike[name].add(value)
        pairs = zip(names, values, strict=True)
        names = [f"{name}, {value}" if value and len(alike[name]) > 1 else name for name, value in pairs]
    return numbered(names)


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


def _ideal(line: Line, lines: int) -> Line:
    base = (line.y[0] or 0.0) / line.x[0]
    return ideal_line(line.name, line.x, [base * count for count in line.x], line.color if lines > 1 else None)
