"""The table of results, and mean and spread of runs that differ only in their seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, stdev

from lockstep.report.document import Cell, Section, filled_table
from lockstep.report.read.curve import Curve
from lockstep.report.read.run import Run
from lockstep.report.read.run_labels import shared_settings
from lockstep.report.read.sources import Material

_COLUMNS = (
    ("run", ""),
    ("best top-1 (%)", ".2f"),
    ("images/s", ",.0f"),
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
    ("images/s, mean", ",.0f"),
    ("training time, mean (s)", ",.1f"),
)


def build(material: Material) -> Section | None:
    if not material.runs:
        return None
    note = (
        f"{shared_settings(material.runs)} Accuracies are validation accuracies. images/s is the median over the "
        "training epochs, or over the step records before the first epoch ends. Training time covers all sessions, "
        "without evaluation; for TensorBoard files it is the sum of Time/train."
    ).strip()
    parts = [filled_table("results", "Runs", _COLUMNS, [_row(run) for run in material.runs], note)]
    groups = seed_groups(material.runs)
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
    """Return the best value, in percent, and its epoch."""
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
