"""The table of results, throughput against the number of workers, and the environment of each measurement."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from lockstep.files.jsonl import mapping, number, text, texts
from lockstep.report.document import Cell, Chart, Line, Section, Table, filled_table, show
from lockstep.report.run import Curve, Run, by_data_set, shared_settings, told_apart
from lockstep.report.run_lines import ideal_line
from lockstep.report.sources import Material

_COLUMNS = (
    ("run", ""),
    ("best top-1 (%)", ".2f"),
    ("samples/s", ",.0f"),
    ("training time (s)", ",.1f"),
    ("best at epoch", ",.4g"),
    ("last top-1 (%)", ".2f"),
    ("last top-5 (%)", ".2f"),
    ("epochs", ""),
)
_SEED_COLUMNS = (
    ("runs", ""),
    ("count", ",.0f"),
    ("best top-1, mean (%)", ".2f"),
    ("standard deviation (%)", ".2f"),
    ("minimum (%)", ".2f"),
    ("maximum (%)", ".2f"),
    ("last top-1, mean (%)", ".2f"),
    ("samples/s, mean", ",.0f"),
    ("training time, mean (s)", ",.1f"),
)


def build(runs: Sequence[Run]) -> Section:
    note = (
        f"{shared_settings(runs)} Accuracies are validation accuracies. samples/s is the median over the "
        "training epochs, or over the step records before the first epoch ends. Training time covers all sessions, "
        "without evaluation."
    ).strip()
    parts = [filled_table("results", "Runs", _COLUMNS, [_row(run) for run in runs], note)]
    groups = seed_groups(runs)
    if groups:
        note = (
            "Runs with the same configuration, machine and number of workers but different seeds. Minimum and maximum "
            "are of best top-1."
        )
        rows = [_seed_row(group) for group in groups]
        parts.append(filled_table("seeds", "Runs that differ only in their seed", _SEED_COLUMNS, rows, note))
    return Section("Results", parts=parts)


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Group complete runs that differ only in their seed; groups have at least two seeds."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.config and run.steady_workers and run.is_complete:
            key = json.dumps(
                [run.settings(), run.steady_workers, run.data, run.arch, run.machine], sort_keys=True, default=str
            )
            groups[key].append(run)
    return [group for group in groups.values() if len({run.seed for run in group}) > 1]


def _row(run: Run) -> list[Cell]:
    top1, top5 = run.epochs.get(("top1", "val")), run.epochs.get(("top5", "val"))
    best, epoch = _best(top1)
    return [
        run.name,
        best,
        run.images_per_second,
        run.train_seconds,
        epoch,
        _last(top1),
        _last(top5),
        _epochs(run),
    ]


def _seed_row(group: Sequence[Run]) -> list[Cell]:
    tops = [run.epochs.get(("top1", "val")) for run in group]
    best = [value for top1 in tops if (value := _best(top1)[0]) is not None]
    return [
        " / ".join(run.name for run in group),
        len(group),
        _mean(best),
        stdev(best) if len(best) > 1 else None,
        min(best, default=None),
        max(best, default=None),
        _mean([_last(top1) for top1 in tops]),
        _mean([run.images_per_second for run in group]),
        _mean([run.train_seconds for run in group]),
    ]


def _epochs(run: Run) -> str | None:
    """Describe the epochs, such as "90", "12 of 90, unfinished" or "12 of 90, stopped"."""
    done = run.done_epochs or 0
    if run.planned_epochs is None:
        return str(done) if run.epochs else None
    if run.reached_goal or done == run.planned_epochs:
        return str(done)
    return f"{done} of {run.planned_epochs}, {'stopped' if run.stopped else 'unfinished'}"


def _best(curve: Curve | None) -> tuple[float | None, float | None]:
    finite = (
        [(value, -epoch) for value, epoch in zip(curve.values, curve.epochs, strict=True) if value == value]
        if curve
        else []
    )
    if not finite:
        return None, None
    value, epoch = max(finite)
    return 100 * value, -epoch


def _last(curve: Curve | None) -> float | None:
    value = curve.values[-1] if curve else None
    return 100 * value if value is not None and value == value else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


ByWorkers = Mapping[int, Sequence[Run]]
_BATCH_KEYS = ("batch_size", "global_batch_size", "accumulate")


def build_workers(runs: Sequence[Run]) -> Section | None:
    jobs = _jobs(runs)
    rates = _lines(jobs, lambda run: run.images_per_second)
    times = _lines(jobs, lambda run: run.train_seconds if run.is_complete else None)
    note = (
        "Medians over runs that differ only in their seed. All runs of a line have the same global batch size (strong "
        "scaling) or the same batch size per worker (weak scaling); bands or whiskers show the full range."
    )
    parts = []
    if rates:
        lines = [*rates, *(_ideal(line, len(rates)) for line in rates)]
        parts.append(_chart("workers-throughput", "Throughput against workers", "throughput (samples/s)", lines, note))
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
            batch = run.global_batch / run.steady_workers
            for share in (f"global batch {run.global_batch:,}", f"batch {batch:,.10g} per worker"):
                jobs[key, share][run.steady_workers].append(run)
    several = [(share, job) for (_, share), job in jobs.items() if len(job) > 1]
    return dict(zip(_labels(several), (job for _, job in several), strict=True))


def _labels(jobs: Iterable[tuple[str, ByWorkers]]) -> list[str]:
    """Return labels of network, data and batch; precision and machine are added where labels would be equal."""
    firsts = [(share, next(iter(job.values()))[0]) for share, job in jobs]
    names = [f"{run.arch or 'a network'} on {run.data or 'data'}, {share}" for share, run in firsts]
    return told_apart(names, [run.precision or "" for _, run in firsts], [run.machine for _, run in firsts])


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


Facts = Mapping[str, Any]
_PACKAGES = {"lockstep-torch": "Lockstep", "torch": "PyTorch", "torchvision": "torchvision", "numpy": "NumPy"}
_ENVIRONMENT_COLUMNS = (
    ("measurement", ""),
    ("command", ""),
    ("processor", ""),
    ("cores", ",.0f"),
    ("memory (GB)", ",.1f"),
    ("GPUs", ""),
    ("threads per worker", ",.0f"),
    ("system", ""),
    ("Python", ""),
    *((name, "") for name in _PACKAGES.values()),
    ("torch platform", ""),
    ("GPU drivers", ""),
    ("commit", ""),
    ("project's commit", ""),
    ("batch system", ""),
    ("batch script requests", ""),
)


def build_environments(material: Material) -> Section | None:
    users: dict[tuple[Cell, ...], list[str]] = {}
    data_sets = by_data_set(material.runs)
    for data, runs in data_sets.items():
        for run in runs:
            if run.environment:
                name = f"{data}: {run.name}" if len(data_sets) > 1 else run.name
                users.setdefault(_environment_row(run.environment, run.environment), []).append(name)
    for record in material.studies:
        facts = mapping(record, "environment")
        if facts:
            users.setdefault(_environment_row(facts, record), []).append(f"study: {record['kind'].replace('_', ' ')}")
    if not users:
        return None
    rows = [[_listed(list(dict.fromkeys(names))), *row] for row, names in users.items()]
    table = filled_table("environment", "Machines and versions", _ENVIRONMENT_COLUMNS, rows)
    if len(rows) == 1:  # one fact a row is easier to read
        cells = zip(table.columns, table.rows[0], table.formats, strict=True)
        pairs: list[list[Cell]] = [[name, show(value, spec)] for name, value, spec in cells if value != ""]
        table = Table(table.key, table.title, ["fact", "value"], pairs[1:], ["", ""])
    return Section("Environment", parts=[table])


def _environment_row(facts: Facts, record: Facts) -> tuple[Cell, ...]:
    memory = number(facts, "memory_bytes")
    return (
        shlex.join(texts(record, "flags")) if "measured_steps" in record else None,  # of a program
        text(facts, "processor"),
        number(facts, "cores"),
        round(memory / 1e9, 1) if memory else None,
        _gpus(facts),
        number(facts, "threads_per_worker"),
        text(facts, "platform"),
        text(facts, "python"),
        *(text(facts, "packages", name) for name in _PACKAGES),
        text(facts, "torch_build"),
        ", ".join(texts(facts, "drivers")) or None,
        text(facts, "commit") or text(record, "commit"),
        text(facts, "project_commit") or None,
        text(record, "batch_system"),
        "; ".join(texts(record, "batch_requests")) or None,
    )


def _gpus(facts: Facts) -> str | None:
    """Describe the GPUs, such as "4 x NVIDIA A100"."""
    found = texts(facts, "gpus")
    return ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found)) or None


def _listed(names: list[str]) -> str:
    return "; ".join(names) if len(names) <= 4 else f"{'; '.join(names[:3])}; and {len(names) - 3} more"
