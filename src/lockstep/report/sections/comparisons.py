"""Benchmarks (benchmarks/): contestants that ran in turns, and their ratios to the first contestant.

Each turn was measured in wall-clock and CPU time (harness.py), or returned a figure (readings.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.files.fields import Record, mapping, numbers, text
from lockstep.report.document import Cell, Section, ValueRange, ValueRanges, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.read.studies import COMPARISON

_COLUMNS = (
    ("benchmark", ""),
    ("contestant", ""),
    ("unit", ""),
    ("median", ",.4g"),
    ("ratio", ".3f"),
    ("ratio by CPU time", ".3f"),
    ("bar", ""),
)


def build(material: Material) -> Section | None:
    newest: dict[str, tuple[Record, list[list[Cell]]]] = {}
    for record in material.of_kind(COMPARISON):
        name = text(record, "name") or "benchmark"
        if rows := list(_rows(name, record)):
            newest[name] = record, rows
    if not newest:
        return None
    charts = [_chart(index, name, record) for index, (name, (record, _)) in enumerate(newest.items(), start=1)]
    note = "Medians over the rounds. Ratios to the first contestant of each benchmark are computed within rounds."
    all_rows = [row for _, rows in newest.values() for row in rows]
    table = filled_table("comparisons", "Benchmarks", _COLUMNS, all_rows, note)
    return Section("Benchmarks", parts=[*(chart for chart in charts if chart.rows), table])


def _chart(index: int, name: str, record: Record) -> ValueRanges:
    contestants = list(_contestants(record))
    first = contestants[0][0] if contestants else ""
    rows = []
    for contestant, row in contestants[1:]:
        quartiles = numbers(row, "ratio", 3) or numbers(row, "wall_ratio", 3)
        if quartiles and min(quartiles) > 0:
            interval = numbers(row, "interval", 2) or numbers(row, "wall_interval", 2)
            low, high = interval or (quartiles[0], quartiles[2])
            rows.append(ValueRange(contestant, low, quartiles[1], high))
    label = f"{text(record, 'unit') or 'the figure'}, relative to {first}"
    note = "Medians of the ratios within rounds, with 95 % intervals, or the full range for fewer than six rounds."
    return ValueRanges(f"comparison-{index}", name, label, rows, (first, 1.0), note)


def _rows(name: str, record: Record) -> Iterator[list[Cell]]:
    for contestant, row in _contestants(record):
        median = _middle(row, "figure", "wall")
        if median is not None:
            ratios = [_middle(row, "ratio", "wall_ratio"), _middle(row, "cpu_ratio")]
            yield [name, contestant, text(record, "unit"), median, *ratios, text(row, "bar")]


def _middle(row: Record, *keys: str) -> float | None:
    """Return the median of the first key that the row has."""
    found = (numbers(row, key, 3) for key in keys)
    return next((quartiles[1] for quartiles in found if quartiles), None)


def _contestants(record: Record) -> Iterator[tuple[str, Record]]:
    for name, row in mapping(record, "contestants").items():
        if isinstance(row, dict):
            yield name, row
