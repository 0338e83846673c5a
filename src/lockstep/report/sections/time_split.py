"""The parts of a step's time by number of workers, and the workers' peak memory."""

from __future__ import annotations

from lockstep.report.document import Bars, Cell, Chart, Line, Section, Table, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.scaling_series import MeasuredPoint, Series, series_of

_PARTS = {
    "data_wait": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "communication_exposed": "communication, exposed",
    "optimizer": "optimizer",
    "other": "other",
}
_COMMUNICATION = (
    ("series", ""),
    ("workers", ",.0f"),
    ("all-reduce alone (ms)", ",.2f"),
    ("exposed (ms)", ",.2f"),
    ("hidden behind backward (ms)", ",.2f"),
    ("hidden (%)", ".0f"),
)


def build(material: Material) -> Section | None:
    series = [item for item in series_of(material.of_kind("scaling"))[0] if any(point.split for point in item.points)]
    parts: list[Bars | Table] = [_bars(item, index) for index, item in enumerate(series, start=1)]
    rows = [row for item in series for row in _communication(item)]
    if rows:
        note = "Alone: the gradients' all-reduce on its own. Hidden: the part of it that overlaps with backward."
        parts.append(filled_table("communication", "Communication per step", _COMMUNICATION, rows, note))
    text = "Medians over the steps of all repeats. The smallest count may belong to both strong and weak scaling."
    return Section("Where a step's time goes", text, parts) if parts else None


def build_memory(material: Material) -> Section | None:
    """Return the section on peak memory per worker against workers."""
    lines = []
    for color, item in enumerate(series_of(material.of_kind("scaling"))[0]):
        known = [(point.workers, point.peak_memory_bytes / 1e9) for point in item.points if point.peak_memory_bytes]
        if known:
            x, y = zip(*known, strict=True)
            lines.append(Line(f"{item.label}, {item.mode}", x, y, color=color))
    if not lines:
        return None
    note = (
        "The largest peak of any worker in any repeat: on a GPU, memory allocated by PyTorch; on a CPU, the resident "
        "set size of the process."
    )
    title, label = "Peak memory against workers", "peak memory per worker (GB)"
    return Section("Memory", parts=[Chart("memory", title, "workers", label, lines, "log2", note=note, from_zero=True)])


def _bars(series: Series, index: int) -> Bars:
    points = [point for point in series.points if point.split]
    names = list(dict.fromkeys([*_PARTS, *(name for point in points for name in point.split or {})]))
    stacks = [(_PARTS.get(name, name), [_milliseconds(point, name) for point in points]) for name in names]
    whole_steps = [1e3 * point.step_seconds for point in points if point.step_seconds is not None]
    return Bars(
        f"time-split-{index}",
        f"A step's time, {series.mode} scaling" + (f" ({index})" if index > 1 else ""),
        "workers",
        "time per step (ms)",
        [f"{point.workers:,}" for point in points],
        [(name, values) for name, values in stacks if any(values)],
        whole_steps if len(whole_steps) == len(points) else None,
        f"{series.label}. Exposed communication is the part that does not overlap with backward.",
    )


def _milliseconds(point: MeasuredPoint, name: str) -> float:
    return 1e3 * (point.split or {}).get(name, 0.0)


def _communication(series: Series) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for point in series.points:
        alone, exposed = point.communication_alone, (point.split or {}).get("communication_exposed")
        if alone and exposed is not None:
            hidden = max(0.0, alone - exposed)
            label = f"{series.label}, {series.mode}"
            rows.append([label, point.workers, 1e3 * alone, 1e3 * exposed, 1e3 * hidden, 100 * hidden / alone])
    return rows
