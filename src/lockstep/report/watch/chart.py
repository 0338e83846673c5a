"""A chart of a few text lines: curves of Braille characters, which have 2 × 4 dots each, with axes; and sparklines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

BLANK = 0x2800
# Bits of Unicode's Braille patterns, by row and column of the dot.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
DASH = 3  # a dashed line skips every third dot along x
BLOCKS = "▁▂▃▄▅▆▇█"


class Canvas:
    """Dots on `width` × `height` characters; a character has the style of the last line drawn there."""

    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self._bits = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def draw(self, points: Sequence[tuple[float, float]], style: str, is_dashed: bool = False) -> None:
        """Draw a line through points, given as shares (0 to 1) of the width and the height; y points up."""
        columns, rows = 2 * self.width - 1, 4 * self.height - 1
        dots = [(round(_clip(x) * columns), round((1 - _clip(y)) * rows)) for x, y in points]
        for column, row in dots[:1]:
            self._set(column, row, style)
        for (column, row), (next_column, next_row) in pairwise(dots):
            length = max(abs(next_column - column), abs(next_row - row))
            for part in range(length + 1):
                share = part / (length or 1)
                x = round(column + share * (next_column - column))
                if not is_dashed or x % DASH != DASH - 1:
                    self._set(x, round(row + share * (next_row - row)), style)

    def lines(self) -> list[list[tuple[str, str]]]:
        """Return each row of characters as its runs of one style: (text, style)."""
        rows = []
        for bits, styles in zip(self._bits, self._styles, strict=True):
            runs: list[tuple[str, str]] = []
            for bit, style in zip(bits, styles, strict=True):
                character = chr(BLANK + bit) if bit else " "
                if runs and runs[-1][1] == style:
                    runs[-1] = (runs[-1][0] + character, style)
                else:
                    runs.append((character, style))
            rows.append(runs)
        return rows

    def _set(self, column: int, row: int, style: str) -> None:
        self._bits[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        self._styles[row // 4][column // 2] = style


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, scaled from 0 to their maximum, in at most `width` characters; the latest value is rightmost."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    top = max(means)
    return "".join(BLOCKS[round(max(0.0, mean) / top * (len(BLOCKS) - 1))] if top > 0 else BLOCKS[0] for mean in means)


LOG_FROM = 8.0  # ratio of highest to lowest value; on a linear scale, most of the curve would lie on the bottom line
TICKED_DECADES = 3  # up to this many decades get ticks within them
SMALLEST_STEP = 1e-300  # between ticks; smaller numbers lose precision
AXIS = "grey50"


@dataclass(frozen=True)
class ChartLine:
    """A named line; `value` is the latest value for the legend."""

    name: str
    value: str
    points: Sequence[tuple[float, float]]
    style: str
    is_dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`, with ticks at round values."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return (value - low) / (high - low)


def scale_for(values: Sequence[float], ticks: int, may_be_log: bool = True) -> Scale:
    """Return a scale that covers all values, with about `ticks` ticks."""
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low > LOG_FROM:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= TICKED_DECADES + 1 and ticks > 2 else (1,)
        marks = tuple(factor * 10.0**decade for decade in decades for factor in factors)
        return Scale(low, high, tuple(mark for mark in marks if low <= mark <= high), is_log=True)
    step = _round_step((high - low or abs(high) or 1.0) / max(1, ticks - 1))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Scale(first * step, last * step, tuple(index * step for index in range(first, last + 1)))


def _round_step(at_least: float) -> float:
    """Round up to 1, 2, 5 or 10 times a power of ten."""
    at_least = max(at_least, SMALLEST_STEP)
    decade = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * decade for factor in (1, 2, 5, 10) if factor * decade >= at_least * (1 - 1e-9))


def draw_chart(
    title: str,
    curves: Sequence[ChartLine],
    width: int,
    height: int,
    show: Callable[[float], str] = lambda value: f"{value:g}",
    may_be_log: bool = True,
) -> list[Text]:
    """Draw curves over epochs in `width` × `height` characters (at least 24 × 4); return the lines.

    Args:
        show: Formats a tick's value.
        may_be_log: Whether to use a logarithmic scale for values that differ by a large factor.
    """
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return [Text(title, "bold"), Text("  no data yet", AXIS), *([Text()] * (height - 2))]
    rows = height - 2
    scale = scale_for([y for curve in drawn for _, y in curve.points], max(2, rows // 2), may_be_log)
    labels = {round((1 - scale.share(tick)) * (rows - 1)): show(tick) for tick in scale.ticks}
    margin = max(map(len, labels.values()), default=0)
    canvas = Canvas(width - margin - 2, rows)
    end = max(max(curve.points[-1][0] for curve in drawn), 1e-9)
    for curve in drawn:
        points = [(x / end, scale.share(y)) for x, y in curve.points]
        canvas.draw(points, curve.style, curve.is_dashed)
    lines = [_heading(title, drawn, width, scale.is_log)]
    for row, runs in enumerate(canvas.lines()):
        axis = f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}"
        lines.append(Text.assemble((axis, AXIS), *runs))
    return [*lines, _x_axis(end, margin, canvas.width)]


def _heading(title: str, curves: Sequence[ChartLine], width: int, is_log: bool) -> Text:
    """Return the title and the legend, in the longest form that fits."""
    whole = _legend(f"{title} (log)" if is_log else title, curves)
    forms = [whole, _legend(title, curves), _legend(title, curves, gap=1, sample=1)]
    return next((form for form in forms if form.cell_len <= width), forms[-1])


def _legend(title: str, curves: Sequence[ChartLine], gap: int = 2, sample: int = 2) -> Text:
    legend = Text(title, style="bold")
    for curve in curves:
        line = ("┄" if curve.is_dashed else "─") * sample
        legend.append(f"{' ' * gap}{line} {curve.name} {curve.value}", style=f"not bold {curve.style}")
    return legend


def _x_axis(end: float, margin: int, width: int) -> Text:
    right = f" epoch {end:.4g}"
    return Text(" " * (margin + 1) + "╰0 " + "─" * max(1, width - 2 - len(right)) + right, style=AXIS)
