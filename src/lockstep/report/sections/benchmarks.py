"""Benchmarks (benchmarks/): contestants that ran in turns, with their ratios to the first; large batches over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from lockstep.files.fields import Record, mapping, number, numbers, text, whole
from lockstep.report.document import Cell, Chart, Line, Section, ValueRange, ValueRanges, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.read.studies import COMPARISON, LARGE_BATCH

_COMPARISON_COLUMNS = (
    ("benchmark", ""),
    ("contestant", ""),
    ("unit", ""),
    ("median", ",.4g"),
    ("ratio", ".3f"),
    ("ratio by CPU time", ".3f"),
    ("bar", ""),
)


def build_comparisons(material: Material) -> Section | None:
    newest: dict[str, tuple[Record, list[list[Cell]]]] = {}
    for record in material.of_kind(COMPARISON):
        name = text(record, "name") or "benchmark"
        if rows := list(_rows(name, record)):
            newest[name] = record, rows
    if not newest:
        return None
    charts = [
        _comparison_chart(index, name, record) for index, (name, (record, _)) in enumerate(newest.items(), start=1)
    ]
    note = "Medians over the rounds. Ratios to the first contestant of each benchmark are computed within rounds."
    all_rows = [row for _, rows in newest.values() for row in rows]
    table = filled_table("comparisons", "Benchmarks", _COMPARISON_COLUMNS, all_rows, note)
    return Section("Benchmarks", parts=[*(chart for chart in charts if chart.rows), table])


def _comparison_chart(index: int, name: str, record: Record) -> ValueRanges:
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


MAX_DIGITS = 15  # of a batch size; more means a damaged record
_LARGE_BATCH_COLUMNS = (
    ("data", ""),
    ("global batch", ",.0f"),
    ("method", ""),
    ("top-1, mean (%)", ".2f"),
    ("minimum (%)", ".2f"),
    ("maximum (%)", ".2f"),
    ("seeds", ",.0f"),
    ("steps", ",.0f"),
    ("training time, median (s)", ",.1f"),
)


@dataclass(frozen=True)
class _Method:
    """Data set, batch size and method, parsed from a name such as "large_batch: MNIST: 1,024, LAMB"."""

    data: str
    batch: int
    name: str


Groups = Mapping[_Method, Mapping[int | None, Record]]  # by seed


def build_large_batch(material: Material) -> Section | None:
    groups: dict[_Method, dict[int | None, Record]] = defaultdict(dict)
    for record in material.of_kind(LARGE_BATCH):
        method = _method(text(record, "name") or "")
        if method:
            groups[method][whole(record, "seed")] = record  # the newest record of each seed
    if not groups:
        return None
    names = dict.fromkeys(method.data for method in groups)
    charts = [_large_batch_chart(index, data, groups) for index, data in enumerate(names, start=1)]
    rows = [_row(method, list(records.values())) for method, records in groups.items()]
    table = filled_table(
        "large-batch", "Large batches", _LARGE_BATCH_COLUMNS, rows, "Mean, minimum and maximum are over the seeds."
    )
    return Section("Large batches", parts=[*charts, table])


def _method(name: str) -> _Method | None:
    parts = [part.strip() for part in name.removeprefix(LARGE_BATCH).strip(": ").split(":", 1)]
    batch, _, method = parts[-1].partition(", ")
    digits = batch.replace(",", "")
    if len(parts) < 2 or not digits.isdecimal() or len(digits) > MAX_DIGITS or not int(digits):
        return None
    return _Method(parts[0], int(digits), method or "unchanged")


def _large_batch_chart(index: int, data: str, groups: Groups) -> Chart:
    methods = sorted((method for method in groups if method.data == data), key=lambda method: method.batch)
    x = [methods[0].batch, methods[-1].batch]
    lines = [_line(color, name, methods, groups) for color, name in enumerate(dict.fromkeys(m.name for m in methods))]
    base = 100 * mean(_tops(groups[methods[0]].values()))
    if x[0] < x[1]:
        lines.append(Line(f"mean at {x[0]:,}", x, [base, base], look="dashed", color=None))
    note = "Means over the seeds; whiskers (vertical lines) show the full range."
    return Chart(
        f"large-batch-{index}", f"Top-1 by global batch: {data}", "global batch", "top-1 (%)", lines, "log2", note=note
    )


def _line(color: int, name: str, methods: Sequence[_Method], groups: Groups) -> Line:
    own = [method for method in methods if method.name == name]
    tops = [[100 * top for top in _tops(groups[method].values())] for method in own]
    x = [method.batch for method in own]
    low, high = [min(values) for values in tops], [max(values) for values in tops]
    return Line(name, x, [mean(values) for values in tops], low, high, "points", color)


def _tops(records: Iterable[Record]) -> list[float]:
    return [top for record in records if (top := number(record, "top1")) is not None]


def _row(method: _Method, records: Sequence[Record]) -> list[Cell]:
    tops = [100 * top for top in _tops(records)]
    steps = [value for record in records if (value := number(record, "steps"))]
    seconds = [value for record in records if (value := number(record, "train_seconds"))]
    return [
        method.data,
        method.batch,
        method.name,
        mean(tops),
        min(tops),
        max(tops),
        len(tops),
        median(steps) if steps else None,
        median(seconds) if seconds else None,
    ]
