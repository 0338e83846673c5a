from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import documents
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from lockstep.report.document import Chart, Line, Mark
from lockstep.report.draw import images
from lockstep.report.draw.matplotlib_curves import draw_curves, drawable
from lockstep.report.draw.palette import LIGHT
from lockstep.report.draw.ticks import of_intervals


def test_each_chart_is_a_png_and_an_svg(tmp_path: Path) -> None:
    document = documents.of(documents.scaling(), documents.split(), documents.results())

    files = images.write(document, tmp_path / "new")

    assert [path.name for path in files] == ["throughput.png", "throughput.svg", "split.png", "split.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(path.name for path in files)
    with Image.open(files[0]) as image:
        assert image.size == (1300, 800)
        assert np.asarray(image.convert("L")).min() < 60  # something is drawn
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")


@pytest.mark.parametrize(("most", "is_wide"), [(1.3, False), (80.0, True)])
def test_intervals_have_a_row_each_and_ticks_within_their_ends(most: float, is_wide: bool, tmp_path: Path) -> None:
    part = documents.ratios(most=most)
    assert part.is_wide == is_wide
    assert 3 <= len(of_intervals(part)) <= 8
    assert 1.0 in of_intervals(part)
    files = images.write(documents.of(part), tmp_path)
    assert [path.name for path in files] == ["ratios.png", "ratios.svg"]


def test_the_same_document_gives_the_same_bytes(tmp_path: Path) -> None:
    document = documents.of(documents.scaling())

    first, second = images.write(document, tmp_path / "a"), images.write(document, tmp_path / "b")

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_hostile_and_empty_documents_are_drawn(tmp_path: Path) -> None:
    assert len(images.write(documents.hostile(), tmp_path)) == 6
    assert len(images.write(documents.empty(), tmp_path)) == 8


def test_names_in_a_script_that_the_font_lacks_are_drawn(tmp_path: Path) -> None:
    chart = Chart("names", "実験", "epoch", "loss", [Line("結果", [1, 2], [3, 4])])

    assert len(images.write(documents.of(chart), tmp_path)) == 2


def test_drawing_leaves_the_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    images.write(documents.of(documents.split()), tmp_path)

    assert dict(matplotlib.rcParams) == before


def test_a_drawing_that_fails_leaves_the_old_file_and_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    (tmp_path / "throughput.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)

    with pytest.raises(OSError, match="No space left"):
        images.write(documents.of(documents.scaling()), tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["throughput.png"]
    assert (tmp_path / "throughput.png").read_bytes() == b"old"


def test_the_legend_of_fifty_runs_says_how_many_more_there_are() -> None:
    figure = images._draw_chart(documents.many(runs=50), LIGHT.line_colors(documents.many(), 50))

    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == 21
    assert (names[0], names[-2], names[-1]) == ("run 0", "run 49", "and 30 more")


def test_the_legend_covers_no_data() -> None:
    for chart in (documents.scaling(), documents.many(runs=12)):
        figure = images._draw_chart(chart, LIGHT.line_colors(chart, 12))
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        assert not axes.get_window_extent().overlaps(legend.get_window_extent())


def test_what_a_scale_cannot_show_is_left_out() -> None:
    curve = drawable(Line("a", [0, 1, 2, math.inf], [5.0, -1.0, 3.0, 4.0]), "log2", "log10")

    assert curve.x == [1, 2]
    assert math.isnan(curve.y[0])
    assert curve.y[1] == 3


def test_the_x_axis_has_the_worker_counts() -> None:
    chart = documents.scaling()
    axes = Figure().add_subplot()
    draw_curves(axes, chart, LIGHT.lines)

    assert list(axes.get_xticks()) == [1, 2, 4, 8]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("values", "start"), [([5.0, 80.0], 1.25), ([1.0, 80.0], 0), ([88.0, 100.0], 87.4), ([-1, 9], -1.5)]
)
def test_an_axis_is_fitted_to_the_values_but_not_below_zero_for_what_is_never_there(
    values: list[float], start: float
) -> None:
    axes = Figure().add_subplot()
    draw_curves(axes, Chart("c", "", "epoch", "accuracy (%)", [Line("a", [1, 2], values)]), LIGHT.lines)

    assert axes.get_ylim()[0] == pytest.approx(start)


def test_the_axis_of_an_amount_starts_at_zero() -> None:
    axes = Figure().add_subplot()
    lines = [Line("a", [1, 2], [0.772, 0.777])]
    draw_curves(axes, Chart("c", "", "workers", "memory (GB)", lines, "log2", from_zero=True), LIGHT.lines)

    low, high = axes.get_ylim()
    assert low == 0
    assert high > 0.8  # the lines do not lie on the frame


@pytest.mark.parametrize("x", [0, 1, 0.5])
@pytest.mark.parametrize("y", [0.0, 97.0])
def test_a_single_place_stands_in_the_middle_and_alone_has_a_number(x: float, y: float) -> None:
    axes = Figure().add_subplot()
    draw_curves(axes, Chart("c", "", "loader processes", "images/s", [Line("a", [x], [y])]), LIGHT.lines)

    assert list(axes.get_xticks()) == [x]
    assert sum(axes.get_xlim()) == pytest.approx(2 * x)
    assert axes.get_ylim()[0] < y < axes.get_ylim()[1]


def test_a_single_value_has_room_on_logarithmic_axes(tmp_path: Path) -> None:
    chart = Chart("c", "", "message size (bytes)", "GB/s", [Line("a", [1024], [5.0])], "log2", "log10")
    axes = Figure().add_subplot()
    draw_curves(axes, chart, LIGHT.lines)

    assert list(axes.get_xticks()) == [1024]
    assert axes.get_xlim() == (512, 2048)
    assert axes.get_ylim() == (2.5, 10)
    assert len(images.write(documents.of(chart), tmp_path)) == 2  # warnings are errors


def test_remarks_stand_at_the_heights_of_their_lines_ends_and_do_not_collide() -> None:
    ends = {"±1 %": 4.0, "±2 %": 2.0, "±3 %": 2.01}
    lines = [Line("model", [1, 2, 3], [0.0, end, None], remark=remark) for remark, end in ends.items()]
    chart = Chart("c", "", "workers", "images/s", lines)
    figure = images._draw_chart(chart, LIGHT.lines)
    figure.draw_without_rendering()

    (axes,) = figure.axes
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert not any(boxes[some].overlaps(boxes[other]) for some in ends for other in ends if some != other)
    assert not any(box.overlaps(axes.get_window_extent()) for box in boxes.values())
    height = axes.transData.transform((2, 4.0))[1]
    assert boxes["±1 %"].y0 < height < boxes["±1 %"].y1
    assert boxes["±1 %"].y0 > boxes["±3 %"].y1 > boxes["±2 %"].y1


def test_texts_of_marks_do_not_collide() -> None:
    marks = [Mark(50 + index / 10, f"loss scale halved, {index}") for index in range(20)]
    chart = Chart("c", "", "step", "loss", [Line("a", [0, 100], [1, 2])], marks=marks)
    figure = images._draw_chart(chart, LIGHT.lines)
    figure.draw_without_rendering()

    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 3
    assert not any(box.overlaps(other) for index, box in enumerate(boxes) for other in boxes[:index])
