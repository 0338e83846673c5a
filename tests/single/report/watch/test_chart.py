"""Charts in text."""

from __future__ import annotations

import pytest

from lockstep.report.watch.chart import Canvas, ChartLine, draw_chart, scale_for, sparkline


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 1.0], (0.0, 0.5, 1.0)),
        ([0.12, 0.88], (0.0, 0.5, 1.0)),
        ([3.0, 3.0], (2.0, 4.0)),
        ([0.0, 0.0], (0.0, 0.5)),
        ([-1.0, 7.0], (-5.0, 0.0, 5.0, 10.0)),
    ],
)
def test_ticks_are_round_and_enclose_all_values(values: list[float], ticks: tuple[float, ...]) -> None:
    scale = scale_for(values, 3, may_be_log=False)
    assert scale.ticks == pytest.approx(ticks)
    assert all(0 <= scale.share(value) <= 1 for value in values)


def test_values_that_differ_by_much_have_a_logarithmic_scale() -> None:
    scale = scale_for([0.02, 2.0], 5)
    assert scale.is_log
    assert scale.ticks == pytest.approx((0.02, 0.05, 0.1, 0.2, 0.5, 1, 2))
    assert scale.share(0.2) == pytest.approx(0.5)
    assert not scale_for([1.0, 2.0], 5).is_log
    assert not scale_for([0.0, 2.0], 5).is_log
    assert scale_for([1e-6, 10.0], 5).ticks == pytest.approx([10.0**power for power in range(-6, 2)])


def test_a_chart_has_its_size_legend_ticks_and_the_last_epoch() -> None:
    curves = [ChartLine("train", "0.5", [(0.5, 2.0), (3, 0.5)], "cyan"), ChartLine("val", "", [], "magenta")]
    lines = [line.plain for line in draw_chart("loss", curves, 40, 8)]
    assert len(lines) == 8
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "loss  ── train 0.5"
    assert any(line.lstrip().startswith("2 ┤") for line in lines)
    assert lines[-1].endswith("epoch 3")
    assert draw_chart("loss", curves[1:], 40, 8)[1].plain.strip() == "no data yet"


def test_the_latest_values_are_whole_where_the_heading_is_long() -> None:
    curves = [
        ChartLine("train", "1.23e-05", [(0.5, 2.0), (3, 1.23e-5)], "cyan"),
        ChartLine("val", "3.21e-05", [(3, 3.21e-5)], "magenta", is_dashed=True),
    ]
    headings = [draw_chart("loss", curves, width, 8)[0].plain for width in (60, 45, 36)]
    assert headings == [
        "loss (log)  ── train 1.23e-05  ┄┄ val 3.21e-05",
        "loss  ── train 1.23e-05  ┄┄ val 3.21e-05",
        "loss ─ train 1.23e-05 ┄ val 3.21e-05",
    ]


@pytest.mark.parametrize("height", range(4, 30))
def test_no_size_and_no_values_break_a_chart(height: int) -> None:
    for values in ([0.0], [1.0, 1.0], [0.0, 1e9], [-3.0, 1e-9], [1e-300, 1e300], [5e-324], [-5e-324, 0.0]):
        curve = ChartLine("train", "", list(enumerate(values)), "cyan")
        assert len(draw_chart("loss", [curve], 24, height)) == height


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
