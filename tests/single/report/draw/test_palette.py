from __future__ import annotations

import documents
import pytest

from lockstep.report.document import Chart, Line
from lockstep.report.draw.palette import DARK, LIGHT, Palette, color_count


def _luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    shares = [part / 255 for part in bytes.fromhex(color[1:])]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(color: str, other: str) -> float:
    low, high = sorted((_luminance(color), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("palette", "background"), [(LIGHT, "#ffffff"), (DARK, "#12161b")])
def test_text_and_lines_stand_out_from_the_background(palette: Palette, background: str) -> None:
    assert _contrast(palette.text, background) > 7
    assert _contrast(palette.muted, background) > 4.5
    assert min(_contrast(color, background) for color in (*palette.lines, *palette.ramp_colors(50))) > 2


def test_a_run_keeps_its_color_in_every_chart_of_few_runs() -> None:
    first, second = (Chart("c", "", "", "", [Line("a", [], [], color=number)]) for number in (2, 5))

    assert LIGHT.line_colors(first, 6)[2] == LIGHT.line_colors(second, 6)[2]


def test_fifty_runs_get_fifty_colors() -> None:
    chart = documents.many(runs=50)

    assert color_count(documents.of(chart)) == 50
    assert len(set(LIGHT.line_colors(chart, 50))) == 50
