"""Group the records of `lockstep study scaling` into series of throughput by number of workers.

Unusable records are skipped with a warning.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median, quantiles
from typing import Any, Literal, NamedTuple, get_args

from lockstep.errors import plural, require
from lockstep.files.jsonl import mapping, number, plausible, text, texts
from lockstep.report.document import told_apart

Mode = Literal["strong", "weak"]
KIND = "scaling"
MAX_WORKERS = 10_000_000  # more means a damaged record
# Positive amounts outside of this range also mean damage, and would overflow in the fit.
SMALLEST, LARGEST = 1e-12, 1e18
EQUAL_BATCHES = 1.25  # largest ratio, as the last batch of an epoch may be smaller
QUARTILES = ("low", "median", "high")
MAX_NAMED = 5  # records per warning
THRESHOLD = 0.75  # the efficiency that computing centers ask for
MAX_EFFICIENCY = 1.1  # more is rarely true
MAX_DISAGREEMENT = 0.25  # of the repeats of one measurement on an idle machine
_RATE_KEY = re.compile(r"(\w{1,40})_per_second", re.ASCII)  # the unit also names a figure's file
_STEPS = ("steps/s", "iterations/s")  # each of which is one of all workers together
_WORKER_STEPS = "worker-steps/s"  # of weak scaling, in which a step does more work with more workers


@dataclass(frozen=True)
class MeasuredPoint:
    """All repeats with one number of workers.

    Args:
        rates: Throughput of each repeat, in the series' `rate_unit`.
        split: Seconds of each part of a step, medians over the repeats; None if not measured.
        threads: Per worker.
        oversubscribed: Whether there are more workers than cores.
        peak_memory_bytes: Largest peak of any worker in any repeat.
        global_batch: Samples per step over all workers.
        step_seconds: Lower quartile, median and upper quartile of the time of a step, each the median over the repeats;
            only the median if nothing else is recorded.
        utilization: Busy share of the accelerators or, on CPUs, of the workers' cores; the mean over the repeats.
        samples_per_step: Of all workers, as measured in a program; None if unknown.
        backward_passes: Of a worker per step, as measured in a program; None if unknown.
        watts: Mean power of all hosts and GPUs, by what is counted; medians over the repeats.
        few_steps: The number of measured steps, if it is smaller than asked for.
    """

    workers: int
    nodes: int | None
    rates: tuple[float, ...]
    split: Mapping[str, float] | None = None
    threads: int | None = None
    oversubscribed: bool = False
    peak_memory_bytes: float | None = None
    global_batch: float | None = None
    step_seconds: Sequence[float | None] = (None, None, None)
    utilization: float | None = None
    samples_per_step: float | None = None
    backward_passes: float | None = None
    few_steps: float | None = None
    watts: Mapping[str, float] = field(default_factory=dict)

    @property
    def images_per_second(self) -> float:
        """The median of the repeats, in the series' `rate_unit`."""
        return median(self.rates)

    @property
    def mean_step_seconds(self) -> float | None:
        """The sum of the parts, which are means; the recorded time of a step if these were not measured."""
        return sum(self.split.values()) if self.split else self.step_seconds[1]

    @property
    def low(self) -> float:
        return quartiles_of(self.rates)[0]

    @property
    def high(self) -> float:
        return quartiles_of(self.rates)[2]


@dataclass(frozen=True)
class Series:
    """One job measured on several numbers of workers.

    Args:
        mode: "strong" for a fixed global batch size, "weak" for a fixed batch size per worker.
        job: The job digest in the records.
        label: The records' `label`, or one made from their fields, such as "resnet18 on cifar10, global batch 256".
        points: Points, sorted by workers.
        source: Source of published data; "" for your own measurements.
        device: "CPUs" or "GPUs", with their model, that computed; "" if not recorded.
        program: The script or module that was measured; "" if unknown.
        unread: Which energy is not counted, and why.
        rate_unit: Such as "tokens/s" for records with tokens_per_second.
    """

    mode: Mode
    job: str
    label: str
    points: tuple[MeasuredPoint, ...]
    source: str = ""
    rate_unit: str = "images/s"
    device: str = ""
    program: str = ""
    unread: tuple[str, ...] = ()

    @property
    def rate_name(self) -> str:
        """The name of the throughput in JSON, such as "images_per_second"."""
        return re.sub(r"\W+", "_", self.rate_unit.removesuffix("/s")) + "_per_second"

    @property
    def base_rate(self) -> float:
        """Throughput per worker at the smallest number of workers."""
        return self.points[0].images_per_second / self.points[0].workers

    def joules_per_sample(self, point: MeasuredPoint) -> float | None:
        """Return a point's energy; None if another point of the series counts more kinds, as both would not compare."""
        counted = {kind for each in self.points for kind in each.watts}
        return sum(point.watts.values()) / point.images_per_second if point.watts.keys() == counted != set() else None


def quartiles_of(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile; of one value, three times that value."""
    return quantiles(values, method="inclusive") if len(values) > 1 else [values[0]] * 3


def efficiencies(points: Sequence[MeasuredPoint]) -> dict[int, float]:
    """Return the throughput per worker by number of workers, relative to that of the first point."""
    first = points[0]
    return {
        point.workers: point.images_per_second * first.workers / (first.images_per_second * point.workers)
        for point in points
    }


def judge(points: Sequence[MeasuredPoint], threshold: float) -> str:
    """Return a verdict on the threshold as a sentence; "" for a single number of workers, or repeats that disagree."""
    below = [workers for workers, efficiency in efficiencies(points).items() if efficiency < threshold]
    if len(points) < 2 or max(map(_disagreement, points)) > MAX_DISAGREEMENT:
        return ""
    if below:
        return f"The efficiency falls below {100 * threshold:.3g} % at {plural(below[0], 'worker')}."
    return f"The efficiency is at least {100 * threshold:.3g} % up to {points[-1].workers} workers."


def _disagreement(point: MeasuredPoint) -> float:
    return max(point.rates) / min(point.rates) - 1


def cautions(mode: str, points: Sequence[MeasuredPoint]) -> list[str]:
    """Return sentences that name what makes the efficiencies of the points doubtful."""
    worst, shares = max(points, key=_disagreement), efficiencies(points)
    lines = [contradict(mode, points)]
    if (difference := _disagreement(worst)) > MAX_DISAGREEMENT:
        repeats = f"The repeats with {plural(worst.workers, 'worker')} differ by {100 * difference:.0f} %"
        lines.append(f"{repeats}: the machine was in use. Measure again, into another file (--out).")
    if (best := max(shares, key=lambda workers: shares[workers])) and shares[best] > MAX_EFFICIENCY:
        efficiency = f"The efficiency is {100 * shares[best]:.0f} % at {plural(best, 'worker')}"
        lines.append(f"{efficiency}, which is rarely true: check the steps with {plural(points[0].workers, 'worker')}.")
    if few := [f"{point.few_steps:.0f} with {plural(point.workers, 'worker')}" for point in points if point.few_steps]:
        lines.append(f"Fewer steps than asked for were measured ({', '.join(few)}), as the program ended.")
    return [line for line in lines if line]


def contradict(mode: str, points: Sequence[MeasuredPoint]) -> str:
    """Return a sentence if the samples per step of the points are not those of the mode; otherwise "".

    If the samples are unknown, the backward passes of a worker show whether it divides a global batch.
    """
    is_weak, noun = mode == "weak", "samples"
    batches = {
        point.workers: point.samples_per_step / (point.workers if is_weak else 1)
        for point in points
        if point.samples_per_step
    }
    if is_weak and not batches:
        noun = "backward passes"
        batches = {point.workers: point.backward_passes for point in points if point.backward_passes}
    if not batches or max(batches.values()) <= EQUAL_BATCHES * min(batches.values()):
        return ""
    shown = ", ".join(f"{batch:.4g} with {plural(workers, 'worker')}" for workers, batch in batches.items())
    of, hint = ("a worker", " (--mode strong: a program divides its global batch)") if is_weak else ("all workers", "")
    return f"The {noun} per step of {of} differ ({shown}), so this is not {mode} scaling{hint}."


def check_threshold(threshold: float) -> None:
    """Check the value of `--threshold`; raises ConfigError."""
    require(0 < threshold <= 1, "--threshold", threshold, "above 0 and at most 1, such as 0.75")


def series_of(records: Iterable[Mapping[str, Any]]) -> tuple[list[Series], list[str]]:
    """Group the scaling records by job, label, batch, mode, machine and unit; records of other kinds are ignored.

    If a repeat has several records, the last one counts. Points measured on a different model of GPU or processor
    belong to a different series.

    Returns:
        The series in the order of their first records, and warnings that cover all skipped records.
    """
    done: set[str] = set()
    groups: dict[_Key, dict[tuple[int, object], Mapping[str, Any]]] = {}
    problems = []
    scaling = (record for record in records if record.get("kind") == KIND)
    for index, record in enumerate(scaling, 1):
        if problem := problem_of(record):
            problems.append((record, problem, index))
            continue
        done.add(_turn(record))
        repeat = record.get("repeat") if number(record, "repeat") is not None else f"record {index}"
        for mode in dict.fromkeys(record["modes"]):
            groups.setdefault(_key(record, mode), {})[record["workers"], repeat] = record
    # A failed run that was repeated successfully needs no warning.
    warnings = _warnings([item for item in problems if not (item[0].get("failed") and _turn(item[0]) in done)])
    return _distinct({key: _series(key, list(group.values())) for key, group in groups.items()}), warnings


class _Key(NamedTuple):
    """What all points of a series have in common; "" if not recorded."""

    mode: Mode
    job: str
    label: str
    batch: str
    source: str
    machine: str
    unit: str


def _key(record: Mapping[str, Any], mode: Mode) -> _Key:
    job, label, source = (text(record, name) or "" for name in ("job", "label", "source"))
    unit = unit_of(record)
    unit = _WORKER_STEPS if mode == "weak" and unit in _STEPS else unit
    return _Key(mode, job, label, _same(record, mode), source, machine_of(record), unit)


def _warnings(problems: Iterable[tuple[Mapping[str, Any], str, int]]) -> list[str]:
    """Return one warning per problem, given the records with their problems and numbers."""
    named = defaultdict(list)
    for record, problem, index in problems:
        named[problem].append(f"{index}{_describe(record)}")
    return [
        f"skipped scaling record{'s' if len(names) > 1 else ''} {', '.join(names[:MAX_NAMED])}"
        f"{', ...' if len(names) > MAX_NAMED else ''}: {problem}"
        for problem, names in named.items()
    ]


def _same(record: Mapping[str, Any], mode: str) -> str:
    """Return the batch size that all points of a series share, global or per worker; "" if unknown."""
    batch = _positive(record, "global_batch" if mode == "strong" else "batch")
    if batch is None:
        return ""
    # The batch size per worker is rounded: a global batch may not divide evenly.
    return f"{batch:.10g}" if mode == "strong" else f"{batch:.0f}"


def _turn(record: Mapping[str, Any]) -> str:
    """Identify a measurement: the job, its number of workers, batch and repeat."""
    return repr([record.get(name) for name in ("job", "workers", "global_batch", "repeat")])


def problem_of(record: Mapping[str, Any]) -> str:
    """Return why a record cannot be used; "" if it can."""
    workers, modes = record.get("workers"), record.get("modes")
    if record.get("failed"):
        return f"the run failed: {_shown(record['failed'])}"
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
        return f"workers must be an integer of at least 1, got {_shown(workers)}"
    if not isinstance(modes, list) or not modes or any(mode not in get_args(Mode) for mode in modes):
        return f'modes must be a list of "strong" and "weak", got {_shown(modes)}'
    name = _rate_key(record)
    if name is None:
        return "no throughput; add a field NOUN_per_second, such as tokens_per_second or trainings_per_second"
    if _positive(record, name) is None:
        return f"{name} must be a positive number, got {_shown(record[name])}"
    return ""


def _distinct(found: Mapping[_Key, Series]) -> list[Series]:
    """Add to labels that would otherwise be equal what differs between their series."""
    labels: dict[_Key, str] = {}
    for mode in get_args(Mode):
        own = {key: series.label for key, series in found.items() if key.mode == mode}
        rows = [
            (key.machine, _describe_batch(key.batch, mode), key.unit, key.job and f"job {key.job}", _shown(key.source))
            for key in own
        ]
        labels |= zip(own, told_apart([*own.values()], *zip(*rows, strict=True)), strict=True)
    return [replace(series, label=labels[key]) for key, series in found.items()]


def _series(key: _Key, records: Sequence[Mapping[str, Any]]) -> Series:
    by_workers: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_workers.setdefault(record["workers"], []).append(record)
    points = tuple(_point(workers, by_workers[workers], key.unit) for workers in sorted(by_workers))
    device = text(records[0], "device")
    computed = f"{'CPUs only' if device == 'cpu' else 'GPUs'}: {key.machine}" if device and key.machine else ""
    unread = dict.fromkeys(line for record in records for line in texts(record, "energy_unread"))
    return Series(
        key.mode,
        key.job,
        _label(records[0], key.mode),
        points,
        key.source,
        key.unit,
        computed,
        program_of(texts(records[0], "flags")),
        tuple(unread),
    )


def program_of(command: Sequence[str]) -> str:
    """Return the name of the script or module in a command; "" if it has none."""
    scripts = [word for word in command if word.endswith(".py")]
    modules = [word for option, word in pairwise(command) if option == "-m"]
    return next((each.rpartition("/")[2] for each in [*scripts, *modules]), "")


def _point(workers: int, records: Sequence[Mapping[str, Any]], unit: str) -> MeasuredPoint:
    factor = workers if unit == _WORKER_STEPS else 1
    rates = (factor * rate for record in records if (rate := rate_of(record)))
    measured = [(number(record, "measured_steps"), number(record, "steps")) for record in records]
    splits = [split for record in records if (split := _split(record))]
    nodes = _middle(records, "nodes")
    # Those that a worker had, or else those that it was to have, which a program may change.
    threads = _middle(records, "environment", "threads_per_worker") or _middle(records, "threads")
    low, middle, high = (_middle(records, "step_seconds", name) for name in QUARTILES)
    cores = _middle(records, "cores")
    on_cpu = all(record.get("device") == "cpu" for record in records)
    return MeasuredPoint(
        workers=workers,
        nodes=None if nodes is None or nodes < 1 else round(nodes),
        rates=tuple(rates),
        split={name: median(split[name] for split in splits) for name in _common(splits)} if splits else None,
        threads=None if threads is None else round(threads),
        oversubscribed=on_cpu and cores is not None and workers / max(1, nodes or 1) > cores,
        peak_memory_bytes=max(_amounts(records, "peak_memory_bytes"), default=None),
        global_batch=_middle(records, "global_batch"),
        step_seconds=(low, middle or _middle(records, "step_seconds"), high),
        samples_per_step=_middle(records, "samples_per_step"),
        backward_passes=_middle(records, "backward_passes_per_step"),
        watts=_watts(records),
        few_steps=min((done for done, wanted in measured if done and wanted and done < wanted), default=None),
        utilization=fmean(shares) if (shares := _amounts(records, "utilization")) else None,
    )


def _watts(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = [mapping(record, "watts") for record in records]
    kinds = [kind for kind in found[0] if all(_positive(each, kind) for each in found)]
    return {kind: median(_amounts(found, kind)) for kind in kinds}


def _rate_key(record: Mapping[str, Any]) -> str | None:
    """Return the first field that has a throughput, such as "tokens_per_second"."""
    return next((key for key in record if record[key] is not None and _RATE_KEY.fullmatch(key)), None)


def unit_of(record: Mapping[str, Any]) -> str:
    return f"{(_rate_key(record) or '').removesuffix('_per_second').replace('_', ' ')}/s"


def rate_of(record: Mapping[str, Any]) -> float | None:
    """Return the throughput; None if the record has none."""
    key = _rate_key(record)
    return _positive(record, key) if key else None


def _split(record: Mapping[str, Any]) -> dict[str, float]:
    split = record.get("split_seconds")
    if not isinstance(split, Mapping):
        return {}
    parts = {str(name): plausible(value) for name, value in split.items()}
    amounts = {name: value for name, value in parts.items() if value is not None and 0 <= value <= LARGEST}
    return amounts if len(amounts) == len(parts) else {}


def _common(splits: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in splits[0] if all(name in split for split in splits)]


def _amounts(records: Sequence[Mapping[str, Any]], *keys: str) -> tuple[float, ...]:
    return tuple(value for record in records if (value := _positive(record, *keys)))


def _middle(records: Sequence[Mapping[str, Any]], *keys: str) -> float | None:
    """Return the median of a field over the repeats that have it; None if none has it."""
    values = _amounts(records, *keys)
    return median(values) if values else None


def _positive(record: Mapping[str, Any], *keys: str) -> float | None:
    value = number(record, *keys)
    return value if value is not None and SMALLEST <= value <= LARGEST else None


def machine_of(record: Mapping[str, Any]) -> str:
    """Return the model of the GPU or, if no GPU was used, of the processor; "" if unknown.

    Args:
        record: A record of any study; `device`, `gpu` and `environment` are used if present.
    """
    facts = mapping(record, "environment")
    gpus = [] if record.get("device") == "cpu" else [text(record, "gpu"), *texts(facts, "gpus")]
    return next(filter(None, gpus), None) or text(facts, "processor") or ""


def _label(record: Mapping[str, Any], mode: str) -> str:
    """Return the record's own label, or describe the job by the fields that the record has."""
    if label := _shown(text(record, "label") or ""):
        return label
    job = " on ".join(name for key in ("arch", "data") if (name := text(record, key))) or "unnamed job"
    precision, compress = text(record, "precision"), text(record, "compress")
    parts = (
        job,
        _describe_batch(_same(record, mode), mode),
        precision if precision != "fp32" else "",
        f"{compress} gradients" if compress not in (None, "none") else "",
        text(record, "gpu"),
    )
    return ", ".join(part for part in parts if part)


def _describe_batch(batch: str, mode: str) -> str:
    return (f"global batch {batch}" if mode == "strong" else f"batch {batch} per worker") if batch else ""


def _describe(record: Mapping[str, Any]) -> str:
    workers, repeat = record.get("workers"), record.get("repeat")
    if not isinstance(workers, int) or workers < 1:
        return ""
    named = plural(_shown(workers), "worker")
    return f" ({named})" if repeat is None else f" ({named}, repeat {_shown(repeat)})"


def _shown(value: object) -> str:
    """Return at most 80 characters of a value of a damaged record, on one line."""
    first = next(iter((value if isinstance(value, str) else repr(value)).splitlines()), "")
    return first if len(first) <= 80 else first[:77] + "..."
