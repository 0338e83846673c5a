"""Charts of a few text lines: bars of Unicode's block characters, with axes, and sparklines.

plotext was tried instead: its import takes 0.6 s, and its wheel has compiled code for one platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
LOG_FROM = 8.0  # ratio of highest to lowest value; on a linear scale, most of the curve would lie on the bottom line
AXIS = "grey50"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, scaled from 0 to their maximum, in at most `width` characters; the latest value is rightmost."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    top = max(means)
    return "".join(BLOCKS[round(max(0.0, mean) / top * (len(BLOCKS) - 1))] if top > 0 else BLOCKS[0] for mean in means)


@dataclass(frozen=True)
class ChartLine:
    """A named line; `value` is the latest value for the heading."""

    name: str
    value: str
    points: Sequence[tuple[float, float]]
    style: str


def draw_chart(
    title: str,
    curves: Sequence[ChartLine],
    width: int,
    height: int,
    show: Callable[[float], str] = lambda value: f"{value:.3g}",
    may_be_log: bool = True,
) -> list[Text]:
    """Draw up to two curves over epochs, one above the other, in `width` × `height` characters (at least 24 × 4).

    Args:
        show: Formats the lowest and the highest value.
        may_be_log: Whether to use a logarithmic scale for values that differ by a large factor.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return [Text(title, "bold"), Text("  no data yet", AXIS), *([Text()] * (height - 2))]
    values = [y for curve in drawn for _, y in curve.points]
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > LOG_FROM
    names = [curve.name for curve in drawn] if len(drawn) > 1 else [""]
    margin = max(map(len, (show(low), show(high), *names)))
    columns, end = width - margin - 2, max(max(curve.points[-1][0] for curve in drawn), 1e-9)
    lines = [_heading(title, drawn)]
    for number, curve in enumerate(drawn):
        rows = (height - 2 + number) // len(drawn)
        shares = [_share(y, low, high, is_log) for y in _resampled(curve.points, end, columns)]
        for row, bar in enumerate(_bars(shares, rows)):
            value = show(high) if row == 0 else show(low) if row == rows - 1 else ""
            name = names[number] if row == 1 and not value else ""
            axis = f"{value or name:>{margin}}", curve.style if name else AXIS
            lines.append(Text.assemble(axis, (" ┤" if value else " │", AXIS), (bar, curve.style)))
    return [*lines, _x_axis(end, margin, columns, is_log)]


def _heading(title: str, curves: Sequence[ChartLine]) -> Text:
    return Text.assemble((title, "bold"), *((f"  {curve.name} {curve.value}", curve.style) for curve in curves))


def _resampled(points: Sequence[tuple[float, float]], end: float, columns: int) -> Iterator[float]:
    """Yield the value of each column up to the last point; before the first point, its value."""
    number = 0
    for column in range(max(1, math.ceil(points[-1][0] / end * columns))):
        while number + 1 < len(points) and points[number + 1][0] * columns <= (column + 1) * end * (1 + 1e-9):
            number += 1
        yield points[number][1]


def _share(value: float, low: float, high: float, is_log: bool) -> float:
    """Return the position of a value between the lowest and the highest, from 0 to 1."""
    if is_log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return (value - low) / ((high - low) or 1.0)


def _bars(shares: Sequence[float], rows: int) -> list[str]:
    """Return bars as lines of characters, from the top; the lowest has the smallest block."""
    levels = [1 + round(share * (len(BLOCKS) * rows - 1)) for share in shares]
    bottoms = [len(BLOCKS) * row for row in reversed(range(rows))]
    return ["".join(_block(level - bottom) for level in levels) for bottom in bottoms]


def _block(level: int) -> str:
    return BLOCKS[min(level, len(BLOCKS)) - 1] if level > 0 else " "


def _x_axis(end: float, margin: int, width: int, is_log: bool) -> Text:
    right = f" epoch {end:.4g}" + ", log scale" * is_log
    return Text(" " * (margin + 1) + "╰0 " + "─" * max(1, width - 2 - len(right)) + right, style=AXIS)
