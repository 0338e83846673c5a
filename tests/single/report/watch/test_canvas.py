"""Dots in characters."""

from __future__ import annotations

import pytest

from lockstep.report.watch.chart import Canvas, sparkline


def _text(canvas: Canvas) -> list[str]:
    return ["".join(text for text, _ in runs) for runs in canvas.lines()]


def test_lines_go_from_corner_to_corner() -> None:
    canvas = Canvas(2, 1)
    canvas.draw([(0, 0), (1, 1)], "red")
    assert _text(canvas) == ["⡠⠊"]
    canvas = Canvas(2, 2)
    canvas.draw([(0, 1), (1, 1)], "red")
    assert _text(canvas) == ["⠉⠉", "  "]


def test_one_point_is_a_dot_and_outliers_are_drawn_at_the_edge() -> None:
    canvas = Canvas(3, 1)
    canvas.draw([(0.5, 0.5)], "")
    assert sum(character != " " for character in _text(canvas)[0]) == 1
    canvas = Canvas(1, 1)
    canvas.draw([(-5, -5), (9, -5)], "")
    assert _text(canvas) == ["⣀"]


def test_the_later_of_two_curves_gives_a_character_its_style() -> None:
    canvas = Canvas(4, 1)
    canvas.draw([(0, 0), (1, 0)], "red")
    canvas.draw([(0, 1), (0.1, 1)], "blue")
    assert [style for _, style in canvas.lines()[0]] == ["blue", "red"]


def test_a_dashed_line_has_gaps() -> None:
    canvas = Canvas(3, 1)
    canvas.draw([(0, 1), (1, 1)], "", is_dashed=True)
    assert _text(canvas) == ["⠉⠈⠁"]


@pytest.mark.parametrize(
    ("values", "width", "blocks"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([5], 10, "█"),
        ([0, 0], 10, "▁▁"),
        ([], 10, ""),
        ([1, 2], 0, ""),
    ],
)
def test_sparklines_begin_at_zero(values: list[float], width: int, blocks: str) -> None:
    assert sparkline(values, width) == blocks
