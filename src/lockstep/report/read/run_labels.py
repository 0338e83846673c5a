"""Short, distinct names of runs for legends, made from the settings in which the runs differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lockstep.files.fields import number
from lockstep.report.read.run import Run

Found = TypeVar("Found")

# Names contain the settings in _FIRST that differ between runs; those in _THEN are added only where names are equal.
_FIRST: Sequence[Callable[[Run], str | None]] = (
    lambda run: run.arch,
    lambda run: describe_workers(run.workers) if run.workers else None,
    lambda run: f"batch {run.global_batch:,}" if run.global_batch else None,
    lambda run: run.precision,
)
_THEN: Sequence[Callable[[Run], str | None]] = (
    lambda run: run.option("optim", "optimizer"),
    lambda run: f"peak rate {rate:.3g}" if (rate := number(run.start, "peak_lr")) else None,
    lambda run: run.option("parallel", "strategy"),
    lambda run: f"compress {how}" if (how := run.option("parallel", "compress")) else None,
    lambda run: f"{run.planned_epochs} epochs" if run.planned_epochs else None,
    lambda run: f"seed {run.seed}" if run.seed is not None else None,
    lambda run: run.path.resolve().name,
    lambda run: run.path.resolve().parent.name,
)


def by_data_set(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group runs by data set. If there is only one data set, runs without a recorded data set are counted to it."""
    known = {run.data for run in runs if run.data}
    other = known.pop() if len(known) == 1 else "data set not recorded"
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.data or other, []).append(run)
    return groups


def shared_settings(runs: Sequence[Run]) -> str:
    """Describe the settings that all runs of one data set share, in a sentence; "" if none is known."""
    shared, is_complete = [], True
    for describe in (lambda run: run.data, *_FIRST):
        values = [describe(run) for run in runs]
        known = {value for value in values if value}
        if len(known) == 1:
            shared.append(known.pop())
            is_complete = is_complete and None not in values
    subject = "All runs" if len(runs) > 1 else "This run"
    return f"{subject}{'' if is_complete else ', as far as recorded'}: {', '.join(shared)}." if shared else ""


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run of one data set: its folder's name if it is the only run or has no known settings."""
    if len(runs) < 2:
        return [run.name for run in runs]
    parts: list[list[str]] = [[] for _ in runs]
    for describe in _FIRST:
        _add_differing(runs, parts, describe)
    for describe in _THEN:
        alike = defaultdict(list)
        for index, part in enumerate(parts):
            alike[tuple(part)].append(index)
        for group in alike.values():
            _add_differing([runs[index] for index in group], [parts[index] for index in group], describe)
    return numbered([", ".join(part) or run.name for run, part in zip(runs, parts, strict=True)])


def describe_workers(workers: Sequence[int]) -> str:
    """Describe the numbers of workers of a run's sessions: "2 workers", or "2 → 4 workers" if they changed."""
    counts = [count for index, count in enumerate(workers) if index == 0 or count != workers[index - 1]]
    return " → ".join(map(str, counts)) + (" worker" if counts == [1] else " workers")


def by_label(found: Mapping[tuple[str, str], Found]) -> dict[str, Found]:
    """Replace the keys (label, machine) with labels; the machine is added where labels would otherwise be equal."""
    alike = Counter(label for label, _ in found)
    names = [label if alike[label] == 1 else f"{label}, {machine or 'unknown machine'}" for label, machine in found]
    return dict(zip(numbered(names), found.values(), strict=True))


def _add_differing(runs: Sequence[Run], parts: Sequence[list[str]], describe: Callable[[Run], str | None]) -> None:
    """Add each run's value of a setting to its name, if the values differ."""
    values = [describe(run) for run in runs]
    if len({value for value in values if value}) > 1:
        for part, value in zip(parts, values, strict=True):
            part.extend([value] if value else [])


def numbered(names: Sequence[str]) -> list[str]:
    """Append a number to each name that occurs more than once."""
    counts: Counter[str] = Counter()
    alike = Counter(names)
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(f"{name} ({counts[name]})" if alike[name] > 1 else name)
    return numbered
