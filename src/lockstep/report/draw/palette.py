"""Color-blind-safe colors, for white paper and for a dark screen.

The first six are from Okabe and Ito ("Color Universal Design", 2008), without black (used for text) and yellow
(too light for white paper). The last two are from Tol ("Colour Schemes", 2021). If there are more lines than colors,
line colors come from a dark-to-light ramp instead: readers cannot match fifty hues to a legend, but a ramp shows the
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.report.document import Chart, Document


@dataclass(frozen=True)
class Palette:
    """The colors for one background, as "#rrggbb".

    Args:
        lines: Colors of lines, if there are enough.
        ramp: Colors to interpolate between if there are more lines.
        stacks: Colors of the parts of stacked bars; neighbors differ in lightness, for grayscale prints.
        text: Color of reference lines.
        muted: Color of marks and axes.
        page: Color of the background.
        grid: Color of grid lines.
    """

    lines: Sequence[str]
    ramp: Sequence[str]
    stacks: Sequence[str]
    text: str
    muted: str
    page: str
    grid: str

    def needs_ramp(self, chart: Chart) -> bool:
        """Whether a chart has color numbers beyond `lines`."""
        return max((line.color for line in chart.lines if line.color is not None), default=0) >= len(self.lines)

    def ramp_colors(self, count: int) -> list[str]:
        """Return the ramp colors of the color numbers 0 to `count - 1`, the same in every chart of a document."""
        return [_mix(self.ramp, number / max(1, count - 1)) for number in range(count)]

    def line_colors(self, chart: Chart, count: int) -> list[str]:
        """Return the color of each color number in a chart; `count` is the document's `color_count`."""
        return self.ramp_colors(count) if self.needs_ramp(chart) else list(self.lines)


LIGHT = Palette(
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255"),
    ramp=("#2d1160", "#35608d", "#22908c", "#4aa84e", "#b8a200"),
    stacks=("#56b4e9", "#0072b2", "#e69f00", "#b2182b", "#8fd0b8", "#5b5b5b", "#cc79a7", "#332288"),
    text="#1f2328",
    muted="#59636e",
    page="#ffffff",
    grid="#d9dee3",
)
DARK = Palette(
    lines=("#4ba3e3", "#ff8c4b", "#2cc795", "#e79ac6", "#f2b53c", "#93d5ff", "#a99bff", "#e2709f"),
    ramp=("#8a7bd8", "#5c9fd6", "#35bdb2", "#86d46b", "#f3e255"),
    stacks=("#93d5ff", "#2b86c9", "#f2b53c", "#dd4b4b", "#a8e0cc", "#8b949e", "#e79ac6", "#8f7ff0"),
    text="#e6edf3",
    muted="#9aa4af",
    page="#12161b",
    grid="#2f3740",
)


def color_count(document: Document) -> int:
    """Return how many colors a document uses: its largest color number plus 1."""
    numbers = [
        line.color
        for section in document.sections
        for part in section.parts
        if isinstance(part, Chart)
        for line in part.lines
        if line.color is not None
    ]
    return max(numbers, default=-1) + 1


def _mix(stops: Sequence[str], share: float) -> str:
    """Interpolate between the colors in `stops`; `share` runs from 0 (first) to 1 (last)."""
    at = share * (len(stops) - 1)
    index = min(int(at), len(stops) - 2)
    low, high = (bytes.fromhex(color[1:]) for color in stops[index : index + 2])
    return "#" + "".join(f"{round(a + (b - a) * (at - index)):02x}" for a, b in zip(low, high, strict=True))
