"""The large-batch study (benchmarks/large_batch.py): accuracy by global batch and method, over several seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from lockstep.files.fields import Record, number, text, whole
from lockstep.report.document import Cell, Chart, Line, Section, filled_table
from lockstep.report.read.sources import Material
from lockstep.report.read.studies import LARGE_BATCH

MOST_DIGITS = 15  # of a batch size; more means a damaged record
_COLUMNS = (
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


def build(material: Material) -> Section | None:
    groups: dict[_Method, dict[int | None, Record]] = defaultdict(dict)
    for record in material.of_kind(LARGE_BATCH):
        method = _method(text(record, "name") or "")
        if method:
            groups[method][whole(record, "seed")] = record  # the newest record of each seed
    if not groups:
        return None
    names = dict.fromkeys(method.data for method in groups)
    charts = [_chart(index, data, groups) for index, data in enumerate(names, start=1)]
    rows = [_row(method, list(records.values())) for method, records in groups.items()]
    table = filled_table(
        "large-batch", "Large batches", _COLUMNS, rows, "Mean, minimum and maximum are over the seeds."
    )
    return Section("Large batches", parts=[*charts, table])


def _method(name: str) -> _Method | None:
    parts = [part.strip() for part in name.removeprefix(LARGE_BATCH).strip(": ").split(":", 1)]
    batch, _, method = parts[-1].partition(", ")
    digits = batch.replace(",", "")
    if len(parts) < 2 or not digits.isdecimal() or len(digits) > MOST_DIGITS or not int(digits):
        return None
    return _Method(parts[0], int(digits), method or "unchanged")


def _chart(index: int, data: str, groups: Groups) -> Chart:
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
