"""Draw a chart's curves, axes and remarks with matplotlib.

Colors come from `palette`. Each line also has its own marker, so that lines stay distinct in grayscale prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.report.document import Chart, Line, Mark, Scale
from lockstep.report.draw import ticks
from lockstep.report.draw.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_MARKERS = "osD^vPX"  # seven markers and eight colors: a pair repeats after 56 lines
_DASHES: dict[str, Any] = {"solid": "-", "dashed": (0, (5, 2)), "dotted": (0, (1.2, 1.4)), "points": "none"}
_FEW_LINES = 8
_FEW_POINTS = 16  # a longer line gets markers only at some points
_MARKERS_A_LINE = 8
_REMARK_ROWS = 3
_REMARK_HEIGHT = 0.06  # as a share of the axes' height
_LETTER_SHARE = 0.0095  # width of a letter of a remark, as a share of the axes' width


class DrawnLine(NamedTuple):
    """The drawable points of a line; NaN is a gap."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


def draw_curves(axes: Axes, chart: Chart, colors: Sequence[str]) -> list[tuple[str, Artist]]:
    """Draw a chart's lines, scales and marks.

    Returns:
        Name and legend handle of each line. Empty if no line has a point; then nothing is drawn.
    """
    curves = [(line, drawable(line, chart.x_scale, chart.y_scale)) for line in chart.lines]
    curves = [(line, curve) for line, curve in curves if curve.x]
    if not curves:
        return []
    is_crowded = len(curves) > _FEW_LINES
    handles = [(line.name, _draw_line(axes, line, curve, colors, is_crowded)) for line, curve in curves]
    _scale(axes.set_xscale, chart.x_scale)
    _scale(axes.set_yscale, chart.y_scale)
    _set_y_range(axes, chart)
    _number(axes.xaxis, chart.x_scale, ticks.measured(chart), ticks.numbers_of(chart.x_label))
    _number(axes.yaxis, chart.y_scale, (), ticks.numbers_of(chart.y_label))
    _set_x_range(axes, chart.x_scale, sorted({x for _, curve in curves for x in curve.x}))
    _draw_marks(axes, chart.marks)
    _draw_remarks(axes, curves, colors)
    return handles


def drawable(line: Line, x_scale: Scale, y_scale: Scale) -> DrawnLine:
    """Return the points of a line that can be drawn: finite, and positive on a logarithmic scale.

    A point with an invalid x is dropped, and an invalid y becomes a gap. If all y are invalid, the line has no points.
    """
    x_fits, y_fits = _fits(x_scale), _fits(y_scale)
    kept = [index for index, x in enumerate(line.x) if x_fits(x)]

    def values(sequence: Sequence[float | None] | None) -> list[float]:
        if sequence is None:
            return []
        return [value if (value := sequence[index]) is not None and y_fits(value) else math.nan for index in kept]

    y = values(line.y)
    if all(map(math.isnan, y)):
        return DrawnLine([], [], [], [])
    return DrawnLine([line.x[index] for index in kept], y, values(line.low), values(line.high))


def _fits(scale: Scale) -> Callable[[float], bool]:
    return math.isfinite if scale == "linear" else lambda value: math.isfinite(value) and value > 0


def _draw_line(axes: Axes, line: Line, curve: DrawnLine, colors: Sequence[str], is_crowded: bool) -> Artist:
    color = _color(line, colors)
    number, is_long = line.color or 0, len(curve.x) > _FEW_POINTS
    is_marked = line.has_markers and not (is_crowded and is_long)
    marker = _MARKERS[number % len(_MARKERS)] if is_marked else None
    step = max(1, len(curve.x) // _MARKERS_A_LINE)
    if curve.low and curve.high and line.look == "points":
        axes.vlines(curve.x, curve.low, curve.high, color=color, linewidth=1)
    elif curve.low and curve.high:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.16, linewidth=0)
    (handle,) = axes.plot(
        curve.x,
        curve.y,
        color=color,
        linestyle=_DASHES[line.look],
        linewidth=0.8 if is_crowded else 1.1 if line.color is None else 1.4,
        marker=marker or ("o" if len(curve.x) == 1 or line.look == "points" else None),
        markersize=3 if is_crowded else 4,
        markerfacecolor="white" if line.look == "dotted" else color,
        # Shift the markers by line, so that those of overlapping lines do not coincide.
        markevery=(number * max(1, step // 7) % step, step) if is_long and line.look != "points" else 1,
        zorder=2 if line.color is None else 3,
    )
    return handle


def _color(line: Line, colors: Sequence[str]) -> str:
    return LIGHT.text if line.color is None else colors[line.color]


def _scale(set_scale: Callable[..., None], scale: Scale) -> None:
    if scale != "linear":
        set_scale("log", base=2 if scale == "log2" else 10)


def _number(axis: Axis, scale: Scale, tick_values: Sequence[float], numbers: ticks.Numbers) -> None:
    """Format an axis's tick labels; a logarithmic axis gets ticks at `tick_values` or, if empty, at round numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if scale != "linear":
        low, high = axis.get_view_interval()
        axis.set_major_locator(FixedLocator(tick_values or ticks.logarithmic(low, high, scale, numbers)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: ticks.number(value, numbers)))


def _set_x_range(axes: Axes, scale: Scale, x_values: Sequence[float]) -> None:
    """Center a single x value and label only it; use integer ticks for counts."""
    if len(x_values) == 1:
        axes.set_xlim(*_around(x_values[0], scale))
        axes.set_xticks(x_values)
    elif scale == "linear" and all(float(x).is_integer() for x in x_values):
        axes.locator_params(axis="x", integer=True)  # there is no epoch 1.5


def _set_y_range(axes: Axes, chart: Chart) -> None:
    """Start the axis at zero if `chart.from_zero`; otherwise fit the data, but do not extend below zero."""
    low, high = axes.dataLim.intervaly
    if low == high:
        axes.set_ylim(*_around(low, chart.y_scale))
    if chart.y_scale != "linear" or low < 0:
        return
    if chart.from_zero:
        axes.set_ylim(0, high * 1.05 or 1.0)
    elif low < high:
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))


def _around(value: float, scale: Scale) -> tuple[float, float]:
    """Return the limits of an axis around a single value."""
    if scale != "linear":
        return value / 2, value * 2
    room = 0.1 * abs(value) or 1.0
    return value - room, value + room


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    """Draw thin lines with labels above the axes; labels that would overlap move up a row or are omitted."""
    low, high = axes.get_xlim()
    ends = [-1.0] * _REMARK_ROWS
    for mark in sorted((mark for mark in marks if low <= mark.x <= high), key=lambda mark: mark.x):
        axes.axvline(mark.x, color=LIGHT.muted, linewidth=0.5, zorder=1)
        share = axes.transAxes.inverted().transform(axes.transData.transform((mark.x, axes.get_ylim()[1])))[0]
        half = len(mark.text) * _LETTER_SHARE / 2
        middle = min(max(share, half), 1 - half)
        row = next((row for row, end in enumerate(ends) if middle - half > end), None)
        if row is not None:
            ends[row] = middle + half + _LETTER_SHARE
            axes.annotate(
                mark.text,
                (middle, 1),
                xycoords="axes fraction",
                xytext=(0, 3 + 8 * row),
                textcoords="offset points",
                ha="center",
                fontsize=6.5,
                color=LIGHT.muted,
            )
    rows = sum(end > 0 for end in ends)
    axes.set_title(axes.get_title(loc="left"), pad=10 + 8 * rows)


def _draw_remarks(axes: Axes, curves: Sequence[tuple[Line, DrawnLine]], colors: Sequence[str]) -> None:
    """Draw remarks to the right of the axes, each at the height of its line's last point or below the previous one."""
    low, high = axes.transAxes.transform((0, 0))[1], axes.transAxes.transform((0, 1))[1]
    remarks = []
    for line, curve in curves:
        if line.remark:
            x, y = next(point for point in zip(curve.x[::-1], curve.y[::-1], strict=True) if not math.isnan(point[1]))
            share = (axes.transData.transform((x, y))[1] - low) / (high - low)
            remarks.append((share, line.remark, _color(line, colors)))
    free = math.inf
    for share, remark, color in sorted(remarks, reverse=True):
        height = min(share, free)
        free = height - _REMARK_HEIGHT
        axes.annotate(
            remark,
            (1, height),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=color,
        )
