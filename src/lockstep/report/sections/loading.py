"""The loading study: the stages, and the pipeline's throughput by loader processes next to the network's demand."""

from __future__ import annotations

from lockstep.files.fields import Record, mapping, rows, spread, text, whole
from lockstep.report.document import Cell, Chart, Line, Section, Table, filled_table
from lockstep.report.read.run_labels import by_label
from lockstep.report.read.sources import Material
from lockstep.report.scaling_series import machine_of

_STAGES = (
    ("study", ""),
    ("stage", ""),
    ("images/s", ",.0f"),
    ("lower quartile", ",.0f"),
    ("upper quartile", ",.0f"),
    ("MB/s", ",.1f"),
    ("reads/s", ",.1f"),
    ("description", ""),
)


def build(material: Material) -> Section | None:
    found: dict[tuple[str, str], Record] = {}
    for record in material.of_kind("loading"):
        found[_label(record), _machine(record)] = record  # keep the newest
    if not found:
        return None
    studies = by_label(found)
    stages = [row for label, record in studies.items() for row in _stages(label, record)]
    lines = [line for color, item in enumerate(studies.items()) for line in _lines(color, *item)]
    parts: list[Table | Chart] = []
    if stages:
        note = "Each stage on its own, on one core with one thread."
        parts.append(filled_table("loading-stages", "Stages of data loading", _STAGES, stages, note))
    if any(len(line.x) > 1 for line in lines):
        note = "The whole pipeline at full speed: medians; bands show the quartiles. Dashed: the network's demand."
        title, label = "Data loading by number of loader processes", "images/s"
        parts.append(Chart("loading-pipeline", title, "loader processes", label, lines, note=note, from_zero=True))
    verdicts = [f"{label}: {line}" for label, record in studies.items() for line in _verdict(record)]
    return Section("Data loading", "\n".join(verdicts), parts)


def _label(record: Record) -> str:
    batch, about = whole(record, "batch"), text(mapping(record, "demand"), "about") or ""
    network = about.partition(":")[0]  # such as "resnet18, fp32: forward, backward and step"
    parts = (text(record, "data"), f"batch {batch:,}" if batch else None, text(record, "device"), network)
    return ", ".join(part for part in parts if part) or "data"


def _machine(record: Record) -> str:
    """Return the processor, which loads the data, and the GPU, if one consumes it."""
    machines = (text(mapping(record, "environment"), "processor"), machine_of(record))
    return ", ".join(dict.fromkeys(machine for machine in machines if machine))


def _stages(label: str, record: Record) -> list[list[Cell]]:
    found: list[list[Cell]] = []
    for stage in rows(record, "stages"):
        rate, size, reads = (
            spread(stage, key) for key in ("images_per_second", "bytes_per_second", "operations_per_second")
        )
        low, middle, high = rate or (None, None, None)
        megabytes = size[1] / 1e6 if size else None
        about = text(stage, "about")
        found.append([label, text(stage, "name"), middle, low, high, megabytes, reads[1] if reads else None, about])
    return found


def _lines(color: int, label: str, record: Record) -> list[Line]:
    found = [(whole(row, "processes"), spread(row, "images_per_second")) for row in rows(record, "pipeline")]
    known = sorted((processes, rates) for processes, rates in found if processes is not None and rates)
    if not known:
        return []
    x = [processes for processes, _ in known]
    low, middle, high = ([rates[index] for _, rates in known] for index in range(3))
    lines = [Line(label, x, middle, low, high, color=color)]
    demand = spread(mapping(record, "demand"), "images_per_second")
    if demand:
        lines.append(Line(f"demand, {label}", x, [demand[1]] * len(x), look="dashed", color=color))
    return lines


def _verdict(record: Record) -> list[str]:
    verdict = record.get("verdict")
    return [line for line in verdict if isinstance(line, str)] if isinstance(verdict, list) else []
