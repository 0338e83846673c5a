from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import documents
import numpy as np
import pytest
import vl_convert
from disks import largest_file
from PIL import Image

from lockstep.report.document import Chart, Document, Line
from lockstep.report.draw import images, write


def _images(document: Document, folder: Path) -> list[Path]:
    return [path for path in write(document, folder) if path.parent.name == "figures"]


def test_each_chart_is_a_png_an_svg_and_a_pdf(tmp_path: Path) -> None:
    document = documents.of(documents.scaling(), documents.split(), documents.results())

    files = _images(document, tmp_path / "new")

    kinds = ("png", "svg", "pdf")
    assert [path.name for path in files] == [f"{key}.{kind}" for key in ("throughput", "split") for kind in kinds]
    assert sorted(path.name for path in (tmp_path / "new" / "figures").iterdir()) == sorted(path.name for path in files)
    with Image.open(files[0]) as image:
        assert 1200 < image.width < 1500
        assert np.asarray(image.convert("L")).min() < 60  # something is drawn
    assert ElementTree.parse(files[1]).getroot().tag.endswith("svg")
    assert files[2].read_bytes().startswith(b"%PDF-")


def test_the_same_document_gives_the_same_bytes(tmp_path: Path) -> None:
    document = documents.of(documents.scaling())

    first, second = _images(document, tmp_path / "a"), _images(document, tmp_path / "b")

    assert [path.read_bytes() for path in first[:2]] == [path.read_bytes() for path in second[:2]]  # not the PDF


def test_hostile_and_empty_documents_are_drawn(tmp_path: Path) -> None:
    assert len(_images(documents.hostile(), tmp_path)) == 6
    assert len(_images(documents.empty(), tmp_path)) == 12


def test_names_in_a_script_that_the_font_lacks_are_drawn(tmp_path: Path) -> None:
    chart = Chart("names", "実験", "epoch", "loss", [Line("結果", [1, 2], [3, 4])])

    assert len(_images(documents.of(chart), tmp_path)) == 3


def test_failed_drawing_leaves_the_old_file(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    figures.mkdir()
    (figures / "throughput.png").write_text("old")

    with largest_file(100), pytest.raises(OSError, match="File too large"):
        _images(documents.of(documents.scaling()), tmp_path)

    assert [path.name for path in figures.iterdir()] == ["throughput.png"]
    assert (figures / "throughput.png").read_text() == "old"


def test_long_names_in_a_legend_keep_their_ends() -> None:
    names = [f"resnet18, 4 workers, batch 1,024, bf16, sgd, seed {number}" for number in range(10)]
    lines = [Line(name, [1, 2], [float(number), 1.0]) for number, name in enumerate(names)]
    svg = vl_convert.vegalite_to_svg(images.specification(Chart("key", "Title", "x", "y", lines)))
    assert [f"seed {number}<" in svg for number in range(10)] == [True] * 10


def test_legend_is_right_of_the_axes_if_there_are_many_lines() -> None:
    few, many = (images.specification(documents.many(runs=runs, epochs=2)) for runs in (8, 50))
    legends = [next(iter(spec["layer"][-1]["encoding"]["shape"]["legend"].items())) for spec in (few, many)]

    assert legends == [("title", None), ("title", "20 of 50")]
    sizes = [ElementTree.fromstring(vl_convert.vegalite_to_svg(spec)).get("width") for spec in (few, many)]
    assert float(sizes[1] or 0) > float(sizes[0] or 0) + 50


@pytest.mark.parametrize(("letters", "names", "columns"), [(14, 4, 2), (14, 3, 3), (14, 5, 3), (30, 4, 2), (4, 8, 4)])
def test_rows_of_a_legend_are_of_about_equal_length(letters: int, names: int, columns: int) -> None:
    lines = [Line(f"{number:0{letters}}", [1, 2], [float(number), 1.0]) for number in range(names)]
    spec = images.specification(Chart("key", "Title", "x", "y", lines))
    assert spec["layer"][-1]["encoding"]["shape"]["legend"]["columns"] == columns
