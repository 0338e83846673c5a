"""Names of runs for legends: short, distinct, and made of what differs between the runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lockstep.files.fields import number
from lockstep.report.read.run import Run

Found = TypeVar("Found")

# What always stands in the names where it differs, and what only where the names would else be alike.
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
    """Runs by what they trained on; those that did not record it belong to the only data set, if there is one."""
    known = {run.data for run in runs if run.data}
    other = known.pop() if len(known) == 1 else "data set not recorded"
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.data or other, []).append(run)
    return groups


def shared_settings(runs: Sequence[Run]) -> str:
    """What all runs of one data set have in common, as a sentence; "" if nothing is known."""
    shared, is_complete = [], True
    for describe in (lambda run: run.data, *_FIRST):
        words = [describe(run) for run in runs]
        known = {word for word in words if word}
        if len(known) == 1:
            shared.append(known.pop())
            is_complete = is_complete and None not in words
    who = "All runs" if len(runs) > 1 else "This run"
    return f"{who}{'' if is_complete else ', as far as recorded'}: {', '.join(shared)}." if shared else ""


def distinct_names(runs: Sequence[Run]) -> list[str]:
    """One name a run of one data set. A lone run, and one of which nothing else is known, has its folder's name."""
    if len(runs) < 2:
        return [run.name for run in runs]
    parts: list[list[str]] = [[] for _ in runs]
    for describe in _FIRST:
        _tell_apart(runs, parts, describe)
    for describe in _THEN:
        alike = defaultdict(list)
        for index, part in enumerate(parts):
            alike[tuple(part)].append(index)
        for group in alike.values():
            _tell_apart([runs[index] for index in group], [parts[index] for index in group], describe)
    return numbered([", ".join(part) or run.name for run, part in zip(runs, parts, strict=True)])


def describe_workers(workers: Sequence[int]) -> str:
    """The workers of a run's sessions, such as "2 workers" or, of a run that was resumed on more, "2 → 4 workers"."""
    counts = [count for index, count in enumerate(workers) if index == 0 or count != workers[index - 1]]
    return " → ".join(map(str, counts)) + (" worker" if counts == [1] else " workers")


def by_label(found: Mapping[tuple[str, str], Found]) -> dict[str, Found]:
    """What is known by a label and a machine, with the machine in the labels that are the same otherwise."""
    alike = Counter(label for label, _ in found)
    names = [label if alike[label] == 1 else f"{label}, {machine or 'unknown machine'}" for label, machine in found]
    return dict(zip(numbered(names), found.values(), strict=True))


def _tell_apart(runs: Sequence[Run], parts: Sequence[list[str]], describe: Callable[[Run], str | None]) -> None:
    """Add each run's word to its name, if they have different ones."""
    words = [describe(run) for run in runs]
    if len({word for word in words if word}) > 1:
        for part, word in zip(parts, words, strict=True):
            part.extend([word] if word else [])


def numbered(names: Sequence[str]) -> list[str]:
    """With a number behind each name that occurs more than once."""
    counts: Counter[str] = Counter()
    alike = Counter(names)
    numbered = []
    for name in names:
        counts[name] += 1
        numbered.append(f"{name} ({counts[name]})" if alike[name] > 1 else name)
    return numbered
