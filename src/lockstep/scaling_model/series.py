"""Group the records of `lockstep study scaling` into series of throughput by number of workers.

Unusable records are skipped with a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, Literal, get_args

from lockstep.files.fields import number, plausible

Mode = Literal["strong", "weak"]
KIND = "scaling"
MOST_WORKERS = 10_000_000  # more means a damaged record
# Positive amounts outside of this range also mean damage, and would overflow in the fit.
SMALLEST, LARGEST = 1e-12, 1e18


@dataclass(frozen=True)
class MeasuredPoint:
    """All repeats with one number of workers.

    Args:
        nodes: Number of nodes; None if not recorded.
        rates: Throughput of each repeat, in the series' `rate_unit`.
        seconds: Training time of each repeat; empty if only rates are known.
        split: Seconds of each part of a step, medians over the repeats; None if not measured.
        communication_alone: Seconds that the all-reduce of the gradients takes on its own.
        oversubscribed: Whether there are more workers than cores.
        peak_memory_bytes: Largest peak of any worker in any repeat.
        global_batch: Samples per step over all workers.
        epoch_seconds: Time per epoch of each repeat; empty if not recorded.
        step_seconds: Time of a whole step, median over the repeats.
    """

    workers: int
    nodes: int | None
    rates: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    split: Mapping[str, float] | None = None
    communication_alone: float | None = None
    oversubscribed: bool = False
    peak_memory_bytes: float | None = None
    global_batch: float | None = None
    epoch_seconds: tuple[float, ...] = ()
    step_seconds: float | None = None

    @property
    def images_per_second(self) -> float:
        """The median of the repeats, in the series' `rate_unit`."""
        return median(self.rates)

    @property
    def low(self) -> float:
        """The lower quartile of the repeats."""
        return self._quartiles[0]

    @property
    def high(self) -> float:
        """The upper quartile of the repeats."""
        return self._quartiles[2]

    @property
    def _quartiles(self) -> list[float]:
        return quantiles(self.rates, method="inclusive") if len(self.rates) > 1 else [self.rates[0]] * 3


@dataclass(frozen=True)
class Series:
    """One job measured on several numbers of workers.

    Args:
        mode: "strong" for a fixed global batch size, "weak" for a fixed batch size per worker.
        job: The job digest in the records.
        label: Human-readable name, such as "resnet18 on cifar10, global batch 256".
        points: Points, sorted by workers.
        source: Source of published data; "" for your own measurements.
        rate_unit: trainings/s if only the time of whole trainings is known.
    """

    mode: Mode
    job: str
    label: str
    points: tuple[MeasuredPoint, ...]
    source: str = ""
    rate_unit: Literal["images/s", "trainings/s"] = "images/s"


def series_of(records: Iterable[Mapping[str, Any]]) -> tuple[list[Series], list[str]]:
    """Group the scaling records by job, batch, mode and machine; records of other kinds are ignored.

    If a repeat has several records, the last one counts. Points measured on a different model of GPU or processor
    belong to a different series.

    Returns:
        The series in the order of their first records, and a warning for each skipped record.
    """
    done: set[str] = set()
    groups: dict[tuple[str, ...], dict[tuple[int, object], Mapping[str, Any]]] = {}
    problems = []
    scaling = (record for record in records if record.get("kind") == KIND)
    for index, record in enumerate(scaling, 1):
        problem = _problem(record)
        if problem:
            problems.append((record, f"skipped scaling record {index}{_describe(record)}: {problem}"))
            continue
        done.add(_turn(record))
        repeat = record.get("repeat") if number(record, "repeat") is not None else f"record {index}"
        for mode in dict.fromkeys(record["modes"]):
            key = (mode, _text(record, "job"), _same(record, mode), _text(record, "source"), machine_of(record))
            group = groups.setdefault(key, {})
            group[record["workers"], repeat] = record
    # A failed run that was repeated successfully needs no warning.
    warnings = [text for record, text in problems if not (record.get("failed") and _turn(record) in done)]
    series = [_series(key, list(group.values()), warnings) for key, group in groups.items()]
    return _distinct(series, [key[-1] for key in groups]), warnings


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


def _problem(record: Mapping[str, Any]) -> str:
    """Return why a record cannot be used; "" if it can."""
    workers, modes = record.get("workers"), record.get("modes")
    if record.get("failed"):
        return f"the run failed: {_shown(record['failed'])}"
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
        return f"workers must be an integer of at least 1, got {_shown(workers)}"
    if not isinstance(modes, list) or not modes or any(mode not in get_args(Mode) for mode in modes):
        return f'modes must be a list of "strong" and "weak", got {_shown(modes)}'
    name = "train_seconds" if record.get("images_per_second") is None else "images_per_second"
    if _positive(record, name) is None:
        return f"{name} must be a positive number, got {_shown(record.get(name))}"
    return ""


def _distinct(series: Sequence[Series], machines: Sequence[str]) -> list[Series]:
    """Add the machine or the job digest to labels that would otherwise be equal."""
    names = Counter((one.mode, one.label) for one in series)
    models = {(one.mode, one.label): set[str]() for one in series}
    for one, machine in zip(series, machines, strict=True):
        models[one.mode, one.label].add(machine)
    return [
        one
        if names[one.mode, one.label] == 1
        else replace(one, label=f"{one.label}, {machine if len(models[one.mode, one.label]) > 1 else 'job ' + one.job}")
        for one, machine in zip(series, machines, strict=True)
    ]


def _series(key: tuple[str, ...], records: Sequence[Mapping[str, Any]], warnings: list[str]) -> Series:
    mode, job, _, source, _ = key
    rated = [record for record in records if _rate(record) is not None]
    unit: Literal["images/s", "trainings/s"] = "images/s" if rated else "trainings/s"
    used = rated or records
    label = _label(used[0], mode)
    if len(used) < len(records):
        warnings.append(
            f"{label}: skipped {len(records) - len(used)} of {len(records)} records, which have train_seconds but not "
            "the samples and epochs to compute a rate"
        )
    by_workers: dict[int, list[Mapping[str, Any]]] = {}
    for record in used:
        by_workers.setdefault(record["workers"], []).append(record)
    points = tuple(_point(workers, by_workers[workers]) for workers in sorted(by_workers))
    return Series("strong" if mode == "strong" else "weak", job, label, points, source, unit)


def _point(workers: int, records: Sequence[Mapping[str, Any]]) -> MeasuredPoint:
    rates = (_rate(record) or 1 / record["train_seconds"] for record in records)
    splits = [split for record in records if (split := _split(record))]
    nodes = _middle(records, "nodes")
    cores = _middle(records, "cores")
    on_cpu = all(record.get("device") == "cpu" for record in records)
    return MeasuredPoint(
        workers=workers,
        nodes=None if nodes is None or nodes < 1 else round(nodes),
        rates=tuple(rates),
        seconds=_amounts(records, "train_seconds"),
        split={name: median(split[name] for split in splits) for name in _common(splits)} if splits else None,
        communication_alone=_middle(records, "communication_alone_seconds"),
        oversubscribed=on_cpu and cores is not None and workers / max(1, nodes or 1) > cores,
        peak_memory_bytes=max(_amounts(records, "peak_memory_bytes"), default=None),
        global_batch=_middle(records, "global_batch"),
        epoch_seconds=_amounts(records, "epoch_seconds"),
        step_seconds=_middle([_typical(record, "step_seconds") for record in records], "step_seconds"),
    )


def _rate(record: Mapping[str, Any]) -> float | None:
    """Return the images per second; None if the record has neither a rate nor what is needed to compute one."""
    rate = _positive(record, "images_per_second")
    samples, epochs, seconds = (_positive(record, name) for name in ("samples", "epochs", "train_seconds"))
    if rate is None and samples and epochs and seconds:
        rate = samples * epochs / seconds
    return rate


def _split(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step; empty if any of them is invalid."""
    split = record.get("split_seconds")
    if not isinstance(split, Mapping):
        return {}
    parts = {str(name): plausible(value) for name, value in split.items()}
    amounts = {name: value for name, value in parts.items() if value is not None and 0 <= value <= LARGEST}
    return amounts if len(amounts) == len(parts) else {}


def _common(splits: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in splits[0] if all(name in split for split in splits)]


def _typical(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field's value, or its median if it is a spread."""
    value = record.get(name)
    return {name: value.get("median") if isinstance(value, Mapping) else value}


def _amounts(records: Sequence[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    """Return the valid values of a field over the repeats."""
    return tuple(value for record in records if (value := _positive(record, name)))


def _middle(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a field over the repeats that have it; None if none has it."""
    values = _amounts(records, name)
    return median(values) if values else None


def _positive(record: Mapping[str, Any], name: str) -> float | None:
    value = number(record, name)
    return value if value is not None and SMALLEST <= value <= LARGEST else None


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def machine_of(record: Mapping[str, Any]) -> str:
    """Return the model of the GPU or, if no GPU was used, of the processor; "" if unknown.

    Args:
        record: A record of any study; `device`, `gpu` and `environment` are used if present.
    """
    environment = record.get("environment")
    facts = environment if isinstance(environment, Mapping) else {}
    gpus = facts.get("gpus")
    first_gpu = gpus[0] if isinstance(gpus, list) and gpus and isinstance(gpus[0], str) else ""
    gpu = "" if record.get("device") == "cpu" else _text(record, "gpu") or first_gpu
    return gpu or _text(facts, "processor")


def _label(record: Mapping[str, Any], mode: str) -> str:
    """Describe the job by the fields that the record has."""
    job = " on ".join(name for key in ("arch", "data") if (name := _text(record, key))) or "unnamed job"
    batch = _positive(record, "global_batch" if mode == "strong" else "batch")
    size = f"batch {batch:.10g}" if batch is not None else ""
    if size:
        size = f"global {size}" if mode == "strong" else f"{size} per worker"
    precision, compress = _text(record, "precision"), _text(record, "compress")
    parts = (
        job,
        size,
        precision if precision != "fp32" else "",
        f"{compress} gradients" if compress not in ("", "none") else "",
        _text(record, "gpu"),
    )
    return ", ".join(part for part in parts if part)


def _describe(record: Mapping[str, Any]) -> str:
    workers, repeat = record.get("workers"), record.get("repeat")
    known = isinstance(workers, int) and workers > 0
    return f" ({workers} workers, repeat {_shown(repeat)})" if known else ""


def _shown(value: object) -> str:
    """Return at most 80 characters of a value of a damaged record, on one line."""
    text = str(value) if isinstance(value, str) else repr(value)
    first = next(iter(text.splitlines()), "")
    return first if len(first) <= 80 else first[:77] + "..."
