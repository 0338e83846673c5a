"""Curves drawn with Braille characters, which have 2 × 4 dots each, and sparklines of block characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
