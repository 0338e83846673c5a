"""Charts as Vega draws them: the texts, lines and points of their SVG images."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import documents
import pytest
import vl_convert

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Chart, Line, Scale
from lockstep.report.draw.images import specification
from lockstep.report.draw.vega import DARK, LIGHT, Palette, draw

SVG = "{http://www.w3.org/2000/svg}"


def _svg(part: Chart | Bars) -> ElementTree.Element:
    return ElementTree.fromstring(vl_convert.vegalite_to_svg(specification(part)))


def _texts(part: Chart | Bars, kind: str = "") -> list[str]:
    """Return the texts in groups of a kind, such as "axis-label"."""
    groups = (group for group in _svg(part).iter(f"{SVG}g") if kind in group.get("class", ""))
    return [text.text or "" for group in groups for text in group.findall(f"{SVG}text") if text.get("opacity") != "0"]


def _axes(chart: Chart) -> tuple[list[str], list[str]]:
    """Return the labels of the x axis and of the y axis."""
    axes = [group for group in _svg(chart).iter(f"{SVG}g") if "role-axis-label" in group.get("class", "")]
    x, y = ([text.text or "" for text in axis.findall(f"{SVG}text")] for axis in axes[-2:])
    return x, y


def _paths(chart: Chart, kind: str) -> list[ElementTree.Element]:
    """Return the marks of a kind, such as "symbol"."""
    groups = (group for group in _svg(chart).iter(f"{SVG}g"))
    marks = (group for group in groups if group.get("class", "").startswith(f"mark-{kind} role-mark"))
    return [path for group in marks for path in group.findall(f"{SVG}path")]


def _of_values(y: list[float], label: str = "loss", scale: Scale = "linear", x: list[float] | None = None) -> Chart:
    return Chart("c", "", "step", label, [Line("a", x or list(range(1, len(y) + 1)), y)], y_scale=scale)


def _rows(chart: Chart) -> list[dict[str, object]]:
    drawing = draw(chart, LIGHT)
    return list(drawing.spec["data"]["values"])


@pytest.mark.parametrize(
    ("values", "label", "shown"),
    [
        ([0, 0.2], "loss", {"0", "0.05", "0.2"}),
        ([0, 20_000], "images/s", {"0", "10,000", "20,000"}),
        ([0, 3e6], "steps", {"0", "500,000", "1.5M"}),
        ([-1500, 0], "loss", {"−1,000", "0"}),
        ([0, 4e9], "bandwidth (bytes/s)", {"0", "1G", "4G"}),
        ([0, 4e-4], "time (s)", {"0", "100µ", "400µ"}),
        ([0, 0.002], "time (s)", {"0", "500µ", "0.002"}),
    ],
)
def test_axis_labels_are_short(values: list[float], label: str, shown: set[str]) -> None:
    assert shown <= set(_axes(_of_values(values, label))[1])


def test_log2_axis_has_ticks_at_the_measured_counts() -> None:
    lines = [Line("a", [1, 3, 6], [1.0, 2.0, 3.0]), Line("b", [1, 2], [1.0, 2.0])]
    assert _axes(Chart("c", "", "workers", "speedup", lines, "log2"))[0] == ["1", "2", "3", "6"]


def test_linear_axes_have_ticks_at_the_measured_counts() -> None:
    lines = [Line("a", [1, 2, 8], [1.0, 2.0, 8.0]), Line("model", [1, 3, 16], [1.0, 3.0, 16.0], look="dashed")]
    chart = Chart("c", "", "workers", "speedup", lines, from_zero=True)
    assert _axes(chart)[0] == ["1", "2", "8", "16"]
    places = [path.get("transform", "").partition(",")[0] for path in _paths(chart, "symbol")]
    assert [round(float(place.removeprefix("translate("))) for place in places] == [
        8,
        39,
        225,
    ]  # of 480: the axis begins at 1


def test_parts_of_bars_keep_the_colors_of_their_numbers() -> None:
    bars = Bars("c", "", "", "", ["1"], [("forward", [1.0]), ("optimizer", [1.0])], colors=[1, 4])
    drawing = draw(bars, LIGHT)
    assert [series.color for series in drawing.series] == [LIGHT.stacks[1], LIGHT.stacks[4]]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_parts_of_bars_have_no_color_of_the_first_lines(palette: Palette) -> None:
    assert not set(palette.stacks) & set(palette.lines[:2])


@pytest.mark.parametrize(
    ("values", "labels"),
    [([722, 5735], ["1,000", "2,000", "5,000"]), ([0.001, 100], ["0.001", "0.01", "0.1", "1", "10", "100"])],
)
def test_logarithmic_axis_has_round_ticks(values: list[float], labels: list[str]) -> None:
    assert _axes(_of_values(values, scale="log2"))[1] == labels


def test_logarithmic_axis_of_the_largest_numbers_is_drawn() -> None:
    assert len(_paths(_of_values([1.0, 1.7e308], scale="log10"), "symbol")) == 2


def test_short_logarithmic_axis_has_ticks() -> None:
    labels = [float(label) for label in _axes(_of_values([1.8, 2.6], scale="log2"))[1]]
    assert len(labels) >= 3
    assert all(1.7 < label < 2.8 for label in labels)


def test_axis_of_epochs_has_whole_numbers_only() -> None:
    assert _axes(_of_values([3.0, 2.0, 1.0]))[0] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("values", "start"), [([5.0, 80.0], "0"), ([1.0, 80.0], "0"), ([88.0, 100.0], "88"), ([-10, 10], "−10")]
)
def test_y_axis_is_fitted_to_the_values_but_not_below_zero(values: list[float], start: str) -> None:
    assert _axes(_of_values(values, "accuracy (%)"))[1][0] == start


def test_y_axis_of_an_amount_starts_at_zero() -> None:
    chart = Chart("c", "", "workers", "memory (GB)", [Line("a", [1, 2], [0.772, 0.777])], "log2", from_zero=True)
    assert _axes(chart)[1][0] == "0"


@pytest.mark.parametrize("x", [0, 1, 0.5])
@pytest.mark.parametrize("y", [0.0, 97.0])
def test_single_point_is_centered_with_its_values_as_labels(x: float, y: float) -> None:
    chart = Chart("c", "", "loader processes", "images/s", [Line("a", [x], [y])])
    assert _axes(chart) == ([f"{x:g}"], [f"{y:g}"])
    assert [path.get("transform") for path in _paths(chart, "symbol")] == ["translate(240,135)"]


def test_single_point_has_room_on_logarithmic_axes() -> None:
    chart = Chart("c", "", "batch size", "images/s", [Line("a", [16], [5.0])], "log2", "log10")
    assert _axes(chart) == (["16"], ["5"])
    assert len(_paths(chart, "symbol")) == 1


def test_points_outside_a_scale_are_left_out() -> None:
    line = Line("a", [0, 1, 2, math.inf], [5.0, -1.0, 3.0, 4.0])
    (row,) = _rows(Chart("c", "", "", "", [line], "log2", "log10"))
    assert (row["x"], row["y"]) == ([1, 2], [None, 3])


def test_data_is_in_the_order_of_x_and_rounded() -> None:
    line = Line("a", [2.0, 1.0, math.nan], [0.123456789, None, 3.0], [0.1, None, 1.0], [0.2, None, 4.0], color=3)
    (row,) = _rows(Chart("c", "", "epoch", "loss", [line]))
    assert (row["x"], row["y"]) == ([1, 2], [None, 0.12346])
    assert (row["low"], row["high"]) == ([None, 0.1], [None, 0.2])


def test_gaps_break_lines_and_single_points_remain() -> None:
    chart = Chart("c", "", "step", "loss", [Line("a", [1, 2, 3, 4, 5], [3, 2.5, None, 2.2, None], look="dashed")])
    assert len(_paths(chart, "symbol")) == 1
    (path,) = _paths(chart, "line")
    assert path.get("d", "").count("L") == 1


def test_spreads_are_bands_or_whiskers() -> None:
    x, y = [1, 2, 3, 4, 5], [11.0, 12.0, 13.0, 13.0, 13.0]
    low, high = [10.0, None, 12.5, 12.5, 12.5], [11.5, None, 20.0, 20.0, 20.0]
    band, points = (Chart("c", "", "", "", [Line("a", x, y, low, high, look)]) for look in ("solid", "points"))
    few = Chart("c", "", "", "", [Line("a", x[:4], y[:4], low[:4], high[:4])])
    assert [len(_paths(chart, "area")) for chart in (band, points, few)] == [1, 0, 0]
    assert [len(_paths(chart, "symbol")) for chart in (points, few)] == [5, 4]
    for chart in (band, points, few):
        labels = _axes(chart)[1]
        assert (labels[0], labels[-1]) == ("10", "20")


def test_long_lines_have_few_markers() -> None:
    assert len(_paths(_of_values([float(y) for y in range(30)]), "symbol")) == 30
    assert 6 <= len(_paths(_of_values([float(y) for y in range(1000)]), "symbol")) <= 10


def test_legend_names_lines_with_their_remarks() -> None:
    chart = Chart("c", "", "", "", [Line("model", [1, 2], [1.0, 2.0], remark="±3 %"), Line("b", [1, 2], [1.0, 2.0])])
    assert _texts(chart, "role-legend-label") == ["model (±3 %)", "b"]


@pytest.mark.parametrize(
    "text", [documents.HOSTILE, "a.b[0]", "$math$ \\frac", "'\" + alert(1)", "datum.x", "_", "{{x}}"]
)
def test_names_are_drawn_literally(text: str) -> None:
    chart = Chart("c", text, text, text, [Line(text, [1, 2], [1.0, 2.0]), Line("b", [1, 2], [2.0, 1.0])])
    bars = Bars("c", text, text, text, [text, "b"], [(text, [1.0, 2.0]), ("b", [1.0, 2.0])])
    for part, times in ((chart, 4), (bars, 5)):
        parts = [shown.partition("…") for shown in _texts(part)]
        drawn = [start for start, _, end in parts if one_line(text).startswith(start) and one_line(text).endswith(end)]
        assert len(drawn) == times, (part, _texts(part))


def test_bars_are_stacked_from_the_bottom() -> None:
    part = documents.split()
    assert _texts(part, "role-legend-label") == ["backward", "forward"]
    frame = vl_convert.vegalite_to_scenegraph(specification(part))["scenegraph"]["items"][0]
    rectangles = [mark["items"] for mark in frame["items"] if mark["marktype"] == "rect"]
    (bars,) = ([(item["y"], item["y"] + item["height"]) for item in items] for items in rectangles)
    assert [bottom for _, bottom in bars] == pytest.approx([270, 270, bars[0][0], bars[1][0]])  # 270 is zero
    assert [bottom - top for top, bottom in bars] == pytest.approx([30 * 2.7, 31 * 2.7, 60 * 2.7, 62 * 2.7])


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
    assert min(_contrast(color, background) for color in palette.lines) > 2


def test_fifty_runs_differ_in_color_or_marker() -> None:
    drawing = draw(documents.many(runs=50), LIGHT)
    assert len({(series.color, series.symbol) for series in drawing.series}) == 50
