"""Charts in text."""

from __future__ import annotations

import pytest

from lockstep.report.watch.chart import ChartLine, draw_chart, sparkline


def _lines(values: list[float], width: int = 24, height: int = 4, may_be_log: bool = True) -> list[str]:
    curve = ChartLine("train", "", list(enumerate(values, 1)), "cyan")
    return [line.plain for line in draw_chart("loss", [curve], width, height, may_be_log=may_be_log)]


def test_bars_rise_from_the_lowest_to_the_highest_value() -> None:
    assert _lines([1.0, 2.0, 3.0], width=24, height=4)[1:-1] == [
        "3 ┤             ▁▁▁▁▁▁▁█",
        "1 ┤▁▁▁▁▁▁▁▁▁▁▁▁▁████████",
    ]


def test_values_that_differ_by_much_have_a_logarithmic_scale() -> None:
    log, linear = (_lines([0.01, 0.1, 1.0], 30, 4, may_be_log=may_be_log) for may_be_log in (True, False))
    assert log[-1].endswith("epoch 3, log scale")
    assert linear[-1].endswith("epoch 3")
    assert log[1:-1] != linear[1:-1]


def test_a_chart_has_its_size_legend_ticks_and_the_last_epoch() -> None:
    curves = [ChartLine("train", "0.5", [(0.5, 2.0), (3, 0.5)], "cyan"), ChartLine("val", "", [], "magenta")]
    lines = [line.plain for line in draw_chart("loss", curves, 40, 8)]
    assert len(lines) == 8
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "loss  train 0.5"
    assert any(line.lstrip().startswith("2 ┤") for line in lines)
    assert lines[-1].endswith("epoch 3")
    assert draw_chart("loss", curves[1:], 40, 8)[1].plain.strip() == "no data yet"


@pytest.mark.parametrize("height", range(4, 30))
def test_no_size_and_no_values_break_a_chart(height: int) -> None:
    for values in ([0.0], [1.0, 1.0], [0.0, 1e9], [-3.0, 1e-9], [1e-300, 1e300], [5e-324], [-5e-324, 0.0]):
        curve = ChartLine("train", "", list(enumerate(values)), "cyan")
        assert len(draw_chart("loss", [curve], 24, height)) == height


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
