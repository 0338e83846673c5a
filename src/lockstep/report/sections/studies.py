"""The studies of batch sizes and data loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lockstep.files.jsonl import Record, mapping, number, rows, spread, text, texts, whole
from lockstep.report.document import Chart, Line, Scale, Section, by_label
from lockstep.report.run_lines import rate_scale
from lockstep.report.scaling_series import machine_of, rate_of
from lockstep.report.sources import Material

Quartiles = tuple[float, float, float]
ONE_JOB = ("job", "workers", "nodes", "memory_limit")


def build_batch(material: Material) -> Section | None:
    found = _searches(material)
    if not found:
        return None
    jobs = by_label(found)
    throughput = [line for color, item in enumerate(jobs.items()) if (line := _throughput(color, *item)).x]
    memory = [line for color, item in enumerate(jobs.items()) for line in _memory(color, *item) if line.x]
    parts = []
    if throughput:
        title, label = "Throughput by batch size", "throughput (samples/s)"
        parts.append(_chart("throughput", title, label, throughput, rate_scale(throughput)))
    if memory:
        title, label = "Memory by batch size", "peak memory per worker (GB)"
        parts.append(_chart("memory", title, label, memory, "linear", "Dashed: the limit."))
    return Section("Batch size", "\n".join(_verdicts(jobs)), parts)


def _chart(key: str, title: str, label: str, lines: Sequence[Line], scale: Scale, note: str = "") -> Chart:
    x_label = "batch size per worker"
    return Chart(f"batch-{key}", title, x_label, label, lines, "log2", scale, note, from_zero=True)


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
            label = _batch_label(next(filter(_fits, own), own[0]))
            if (label, machine) in found:  # a job with other flags
                label = f"{label}, job {text(own[0], 'job') or 'unknown'}"
            found.setdefault((label, machine), {}).update({whole(record, "batch") or 0: record for record in own})
    return found


def _batch_label(record: Record) -> str:
    workers, precision, limit = whole(record, "workers") or 1, text(record, "precision"), text(record, "memory_limit")
    name = text(record, "label") or f"{text(record, 'arch') or 'a network'} on {text(record, 'data') or 'data'}"
    parts = (precision, f"{workers} workers" if workers > 1 else None, f"memory limit {limit}" if limit else None)
    return ", ".join([name, *(part for part in parts if part)])


def _fits(record: Record) -> bool:
    return record.get("fits") is not False


def _fitting(records: Mapping[int, Record]) -> list[tuple[int, Record]]:
    return [(batch, records[batch]) for batch in sorted(records) if _fits(records[batch])]


def _throughput(color: int, label: str, records: Mapping[int, Record]) -> Line:
    known = [(batch, rate) for batch, record in _fitting(records) if (rate := rate_of(record))]
    return Line(label, [batch for batch, _ in known], [rate for _, rate in known], color=color)


def _with_quartiles(label: str, found: Iterable[tuple[int | None, Quartiles | None]], color: int) -> Line:
    """Return a line of the points whose x and quartiles are known."""
    known = sorted((x, rates) for x, rates in found if x is not None and rates)
    low, middle, high = ([rates[index] for _, rates in known] for index in range(3))
    return Line(label, [x for x, _ in known], middle, low, high, color=color)


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


def _verdicts(jobs: Mapping[str, Mapping[int, Record]]) -> Sequence[str]:
    lines = []
    for label, records in jobs.items():
        fitting = _fitting(records)
        misfit = min((batch for batch, record in records.items() if not _fits(record)), default=None)
        if fitting and misfit:
            why = text(records[misfit], "why") or "no reason recorded"
            lines.append(f"{label}: the largest batch that fits is {fitting[-1][0]:,}; {misfit:,} does not ({why}).")
    return lines


def build_loading(material: Material) -> Section | None:
    found: dict[tuple[str, str], Record] = {}
    for record in material.of_kind("loading"):
        found[_loading_label(record), _machine(record)] = record  # keep the newest
    if not found:
        return None
    studies = by_label(found)
    lines = [line for color, item in enumerate(studies.items()) for line in _lines(color, *item)]
    parts = []
    if any(len(line.x) > 1 for line in lines):
        note = "The pipeline at full speed: medians; bands or whiskers are the quartiles. Dashed: the network's demand."
        title, label = "Data loading by number of loader processes", "images/s"
        parts.append(Chart("loading-pipeline", title, "loader processes", label, lines, note=note, from_zero=True))
    verdicts = [f"{label}: {line}" for label, record in studies.items() for line in texts(record, "verdict")]
    return Section("Data loading", "\n".join(verdicts), parts)


def _loading_label(record: Record) -> str:
    batch, about = whole(record, "batch"), text(mapping(record, "demand"), "about") or ""
    network = about.partition(":")[0]  # such as "resnet18, fp32: forward, backward and step"
    parts = (text(record, "data"), f"batch {batch:,}" if batch else None, text(record, "device"), network)
    return ", ".join(part for part in parts if part) or "data"


def _machine(record: Record) -> str:
    """Return the processor, which loads the data, and the GPU, if one consumes it."""
    machines = (text(mapping(record, "environment"), "processor"), machine_of(record))
    return ", ".join(dict.fromkeys(machine for machine in machines if machine))


def _lines(color: int, label: str, record: Record) -> list[Line]:
    found = ((whole(row, "processes"), spread(row, "images_per_second")) for row in rows(record, "pipeline"))
    measured = _with_quartiles(label, found, color)
    demand = spread(mapping(record, "demand"), "images_per_second")
    if not measured.x or not demand:
        return [measured] if measured.x else []
    needed = [demand[1]] * len(measured.x)
    return [measured, Line(f"demand, {label}", measured.x, needed, look="dashed", color=color)]
