"""The collectives study: bus bandwidth and latency by message size."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import plural
from lockstep.files.fields import Record, number, rows, spread, text, whole
from lockstep.report.document import Chart, Line, Section
from lockstep.report.read.sources import Material
from lockstep.report.scaling_series import machine_of


def build(material: Material) -> Section | None:
    settings: dict[str, dict[str, Record]] = {}
    unsupported = []
    for record in material.of_kind("collectives"):
        operation, setting = text(record, "operation") or "operation", _setting(record)
        if rows(record, "points"):
            settings.setdefault(setting, {}).pop(operation, None)
            settings[setting][operation] = record  # keep the newest
        elif why := text(record, "unsupported"):
            unsupported.append(f"{operation} ({setting}): {why}")
    parts = [chart for index, item in enumerate(settings.items(), start=1) for chart in _charts(index, *item)]
    if not parts and not unsupported:
        return None
    about = "Bus bandwidth as defined by nccl-tests: the required link rate, independent of the number of workers."
    return Section("Collectives", "\n".join([about, *dict.fromkeys(unsupported)]), parts)


def _setting(record: Record) -> str:
    workers, nodes = whole(record, "workers"), whole(record, "nodes")
    parts = (
        plural(workers, "worker") if workers else None,
        f"{nodes} nodes" if nodes and nodes > 1 else None,
        text(record, "backend"),
        text(record, "device"),
        text(record, "dtype"),
        machine_of(record),
    )
    return ", ".join(part for part in parts if part) or "unknown setting"


def _charts(index: int, setting: str, operations: Mapping[str, Record]) -> list[Chart]:
    bandwidth = [_bandwidth(color, *item) for color, item in enumerate(operations.items())]
    latency = [_latency(color, *item) for color, item in enumerate(operations.items())]
    note = "Medians of the repeats; bands show the quartiles."
    kinds = (
        ("bandwidth", "Bus bandwidth", "bus bandwidth (GB/s)", bandwidth),
        ("latency", "Time per call", "time per call (µs)", latency),
    )
    return [
        Chart(
            f"collectives-{key}-{index}",
            f"{title}: {setting}",
            "message size (bytes)",
            label,
            [line for line in lines if line.x],
            "log2",
            "log10",
            note=note,
        )
        for key, title, label, lines in kinds
        if any(line.x for line in lines)
    ]


def _bandwidth(color: int, operation: str, record: Record) -> Line:
    found = [(_size(point), number(point, "bus_bandwidth")) for point in rows(record, "points")]
    known = sorted((size, rate / 1e9) for size, rate in found if size and rate)
    return Line(operation, [size for size, _ in known], [rate for _, rate in known], color=color)


def _latency(color: int, operation: str, record: Record) -> Line:
    found = [(_size(point), spread(point, "seconds")) for point in rows(record, "points")]
    known = sorted((size, times) for size, times in found if size and times and min(times) > 0)
    low, middle, high = ([1e6 * times[index] for _, times in known] for index in range(3))
    return Line(operation, [size for size, _ in known], middle, low, high, color=color)


def _size(point: Record) -> float | None:
    return number(point, "size_bytes")
