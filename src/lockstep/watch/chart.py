"""A chart of a few text lines: curves, with the y axis to the left and the x axis below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.watch.canvas import Canvas

if TYPE_CHECKING:
    from rich.text import Text

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
    from rich.text import Text

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
    from rich.text import Text

    legend = Text(title, style="bold")
    for curve in curves:
        line = ("┄" if curve.is_dashed else "─") * sample
        legend.append(f"{' ' * gap}{line} {curve.name} {curve.value}", style=f"not bold {curve.style}")
    return legend


def _x_axis(end: float, margin: int, width: int) -> Text:
    from rich.text import Text

    right = f" epoch {end:.4g}"
    return Text(" " * (margin + 1) + "╰0 " + "─" * max(1, width - 2 - len(right)) + right, style=AXIS)
