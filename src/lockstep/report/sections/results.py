"""The table of results, and the environment of each measurement."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from lockstep.files.jsonl import mapping, number, text, texts
from lockstep.files.metric_records import JOULES_PER_KWH
from lockstep.report.document import Cell, Section, Table, filled_table, show
from lockstep.report.run import Curve, Run, by_data_set, shared_settings
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
    ("energy (kWh)", ",.4g"),
    ("energy per epoch (kWh)", ",.4g"),
    ("energy per sample (J)", ",.4g"),
    ("CO2e (g)", ",.4g"),
)
_WORKER_COLUMNS = (
    ("data set", ""),
    ("network", ""),
    ("workers", ",.0f"),
    ("time per epoch (s)", ",.4g"),
    ("samples/s", ",.0f"),
    ("best top-1 (%)", ".2f"),
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


def build(runs: Sequence[Run], carbon: float | None = None) -> Section:
    """Return the table of runs; with `carbon`, the grams of CO2 equivalents per kWh, also their emissions."""
    sentences = [
        shared_settings(runs),
        "Accuracies are validation accuracies." if any(("top1", "val") in run.epochs for run in runs) else "",
        "samples/s is the median over the training epochs, or over the step records before the first epoch ends.",
        "Training time covers all sessions, without evaluation.",
        f"CO2e at {carbon:g} g/kWh." if carbon is not None and any(run.joules for run in runs) else "",
        *(
            f"Energy that is not counted: {line}."
            for line in dict.fromkeys(line for run in runs for line in run.not_counted)
        ),
    ]
    rows = [_row(run, carbon) for run in runs]
    parts = [filled_table("results", "Runs", _COLUMNS, rows, " ".join(filter(None, sentences)))]
    groups = seed_groups(runs)
    if groups:
        note = (
            "Runs with the same configuration, machine and number of workers but different seeds. Minimum and maximum "
            "are of best top-1."
        )
        rows = [_seed_row(group) for group in groups]
        parts.append(filled_table("seeds", "Runs that differ only in their seed", _SEED_COLUMNS, rows, note))
    return Section("Results", parts=parts)


def build_workers(data_sets: Mapping[str, Sequence[Run]]) -> Section | None:
    """Return a table of numbers of workers and data sets; None unless the number of workers differs between runs."""
    groups: dict[tuple[str, str | None, int], list[Run]] = defaultdict(list)
    for data, runs in data_sets.items():
        for run in runs:
            if run.steady_workers:
                groups[data, run.arch, run.steady_workers].append(run)
    if len({workers for _, _, workers in groups}) < 2:
        return None
    rows = [[*key, *_medians(groups[key])] for key in sorted(groups, key=lambda key: (key[0], key[1] or "", key[2]))]
    note = "Medians over the runs and, of the time per epoch, over the epochs; without evaluations."
    table = filled_table("workers", "Workers and data sets", _WORKER_COLUMNS, rows, note)
    return Section("Workers and data sets", parts=[table])


def _medians(group: Sequence[Run]) -> list[Cell]:
    best = [_best(run.epochs.get(("top1", "val")))[0] for run in group]
    columns = ([run.epoch_seconds for run in group], [run.images_per_second for run in group], best)
    return [median(known) if (known := [each for each in column if each is not None]) else None for column in columns]


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


def _row(run: Run, carbon: float | None) -> list[Cell]:
    hours, epochs = run.joules and run.joules / JOULES_PER_KWH, run.epochs.get(("kilowatt_hours", "train"))
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
        hours,
        _mean(epochs.values) if epochs else None,
        run.joules_per_sample,
        hours and carbon and hours * carbon,
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
    ("program's commit", ""),
    ("Lockstep's commit", ""),
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
        _commit(text(facts, "project_commit")) or ("unknown, or not in Git" if "project_commit" in facts else None),
        _commit(text(facts, "commit") or text(record, "commit")),
        text(record, "batch_system"),
        "; ".join(texts(record, "batch_requests")) or None,
    )


def _commit(name: str | None) -> str | None:
    """Say whether the checkout had changes that are not in the commit."""
    if not name:
        return None
    return f"{name.removesuffix('-dirty')}, {'with uncommitted changes' if name.endswith('-dirty') else 'clean'}"


def _gpus(facts: Facts) -> str | None:
    """Describe the GPUs, such as "4 x NVIDIA A100"."""
    found = texts(facts, "gpus")
    return ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found)) or None


def _listed(names: list[str]) -> str:
    return "; ".join(names) if len(names) <= 4 else f"{'; '.join(names[:3])}; and {len(names) - 3} more"
