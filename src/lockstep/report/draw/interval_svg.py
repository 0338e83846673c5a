"""Draw values with their ranges as an SVG for the page, in the page's colors and without a script."""

from __future__ import annotations

import math
from html import escape

from lockstep.report.document import ValueRange, ValueRanges
from lockstep.report.draw.ticks import number, of_intervals

_NAMES, _PLOT, _FIGURES, _ROW, _ABOVE, _BELOW = 250, 400, 190, 26, 24, 44  # pixels
_LONGEST_NAME = 38


def draw(part: ValueRanges) -> str:
    """Return the SVG. Long names are truncated; the report's table has the full names."""
    axis = _Axis(part)
    height = _ABOVE + _ROW * len(part.rows)
    size = f"{_NAMES + _PLOT + _FIGURES} {height + _BELOW}"
    lines = [f'<svg class="intervals" viewBox="0 0 {size}" role="img" aria-label="{escape(part.title)}">']
    for tick in of_intervals(part):
        x = axis.of(tick)
        lines.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_ABOVE}" y2="{height}"/>')
        lines.append(f'<text x="{x}" y="{height + 16}" text-anchor="middle">{escape(number(tick))}</text>')
    name, value = part.reference
    x = axis.of(value)
    lines.append(f'<line class="reference" x1="{x}" x2="{x}" y1="{_ABOVE}" y2="{height}"/>')
    lines.append(f'<text x="{x}" y="{_ABOVE - 8}" text-anchor="middle">{escape(name)}</text>')
    for index, row in enumerate(part.rows):
        lines += _row(row, axis, _ABOVE + _ROW * index + _ROW // 2)
    middle = _NAMES + _PLOT // 2
    lines.append(f'<text x="{middle}" y="{height + 36}" text-anchor="middle">{escape(part.x_label)}</text>')
    return "\n".join([*lines, "</svg>"])


def _row(row: ValueRange, axis: _Axis, y: int) -> list[str]:
    name = row.name if len(row.name) <= _LONGEST_NAME else f"{row.name[: _LONGEST_NAME - 1]}…"
    low, middle, high = (axis.of(value) for value in (row.low, row.middle, row.high))
    figures = f"{row.middle:.3g} ({row.low:.3g} to {row.high:.3g})"
    return [
        f'<text x="{_NAMES - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>',
        f'<line class="range" x1="{low}" x2="{high}" y1="{y}" y2="{y}"/><circle cx="{middle}" cy="{y}" r="4.5"/>',
        f'<text x="{_NAMES + _PLOT + 12}" y="{y + 4}">{figures}</text>',
    ]


class _Axis:
    """Map a value to its position in pixels from the left."""

    def __init__(self, part: ValueRanges) -> None:
        self._scale = math.log if part.is_wide else float
        ends = [self._scale(end) for end in (*part.ends, *of_intervals(part))]
        self._low, self._length = min(ends), (max(ends) - min(ends)) or 1.0

    def of(self, value: float) -> float:
        return round(_NAMES + 8 + (_PLOT - 16) * (self._scale(value) - self._low) / self._length, 1)
