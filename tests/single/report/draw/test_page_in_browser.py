"""The page in Chromium without a window: `visit.js` does what a reader does, and leaves in the page what it saw."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import documents
import pytest
from browser import browse
from report_material import make_run, run_records, scaling_record, write_lines

from lockstep.report.document import Chart, Document, Line, Section, Table
from lockstep.report.draw import page
from lockstep.report.sections import build
from lockstep.report.sources import gather


def _with_visit(html: str) -> str:
    """The page with the script that visits it, which its policy must allow."""
    script = Path(__file__).with_name("visit.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    return html.replace("<title>", f"<script>{script}</script><title>", 1)


def _visit(document: Document, folder: Path, width: int = 1000, *flags: str) -> dict[str, Any]:
    """What the scripts saw in the page."""
    html = _browse(_with_visit(page.render(document)), folder, f"--window-size={width},6000", "--dump-dom", *flags)
    (text,) = re.findall('<pre id="seen">(.*?)</pre>', html, flags=re.DOTALL)
    return dict(json.loads(unescape(text)))


def _browse(html: str, folder: Path, *flags: str) -> str:
    """Open a page in the browser, which does what the flags ask for, and return what it prints."""
    file = folder / "index.html"
    file.write_text(html, encoding="utf-8")
    return browse(file, folder / "profile", *flags)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One visit for all the tests."""
    percents = Chart("percents", "Percents", "epoch", "top-1 accuracy (%)", [Line("a", [1, 2], [88.0, 99.0])])
    single = Chart("single", "One point", "loader processes", "images/s", [Line("a", [3], [5.0])])
    parts = [documents.many(runs=12, epochs=40), documents.scaling(), documents.split(), percents, single]
    sections = [Section("Figures", parts=[*parts, documents.results()])]
    sections += [*documents.hostile().sections, *documents.empty().sections]
    return _visit(Document("A report", sections, [documents.HOSTILE]), tmp_path_factory.mktemp("page"))


def test_every_chart_is_drawn_without_an_error_or_a_request(seen: dict[str, Any]) -> None:
    assert seen["errors"] == []
    assert seen["requests"] == 0
    assert seen["drawn"] == seen["charts"] == 7


def test_percents_are_fitted_and_a_button_shows_0_to_100(seen: dict[str, Any]) -> None:
    fitted, whole, again = seen["percents"]

    assert fitted == again == [88, 99]
    assert whole == [0, 100]
    assert seen["switches"] == 2  # for both charts in percent


@pytest.mark.parametrize("width", [500, 1050])
def test_tables_of_results_are_complete_at_any_width(width: int, tmp_path: Path) -> None:
    for workers in (1, 2, 16):
        records = run_records(workers=workers, global_batch=64 * workers)
        make_run(tmp_path / "runs" / f"a-long-name-{workers}", records[:-2], config="epochs: 12\nseed: 0\n")
    write_lines(tmp_path / "runs" / "scaling.jsonl", [scaling_record(workers) for workers in (1, 2, 4)])
    document = build(gather([tmp_path / "runs"]), "A report")
    if width > 500:
        headings = [f"a long heading {number}" for number in range(30)]
        wide = Section("Wide", parts=[Table("wide", "Wide", headings, [[1] * 30], ["d"] * 30)])
        document = replace(document, sections=[*document.sections, wide])
    seen = _visit(document, tmp_path, width)

    assert "results" in dict(seen["hints"])
    assert "results" not in seen["tooWide"]
    assert all(is_hidden == (key not in seen["tooWide"]) for key, is_hidden in seen["hints"])
    assert all(outer == inner for outer, inner in seen["widths"])
    assert seen["pageWidth"][0] <= seen["pageWidth"][1] == width  # the page itself does not scroll sideways
    assert ("wide" in seen["tooWide"]) == (width > 500)
    if width == 500:
        assert not seen["tooWide"]  # each row is a card


def test_markup_in_names_of_runs_does_nothing(seen: dict[str, Any]) -> None:
    assert seen["title"] == "A report"


def test_keys_zoom_move_and_reset_a_chart(seen: dict[str, Any]) -> None:
    assert seen["reachable"] == 0
    zoomed, moved, out, *whole = [[float(end) for end in view.split(" to ") if end] for view in seen["views"]]
    assert zoomed == pytest.approx([10.576, 30.424], abs=0.1)
    assert moved == pytest.approx([end + 1.985 for end in zoomed], abs=0.1)
    assert out[1] - out[0] > 1.5 * (zoomed[1] - zoomed[0])
    assert whole == [[], []]  # by a key, and by a double click


def test_y_axis_is_fitted_to_the_values_in_view(seen: dict[str, Any]) -> None:
    whole, part = seen["ranges"]
    assert whole == [0, 55]
    assert part == [0, 22]


def test_dragging_zooms_in(seen: dict[str, Any]) -> None:
    assert seen["dragged"] == pytest.approx(seen["expected"], abs=0.01)


def test_the_read_out_has_the_values_at_the_pointer(seen: dict[str, Any]) -> None:
    lines = ["workers: 4", "measured (±3 %)", "2,925 (2,900 to 2,975)", "ideal", "2,888"]
    assert seen["readOut"].split("\n") == lines
    bars = ["workers: 1", "backward", "60", "forward", "30", "sum", "90"]
    assert seen["barReadOut"].split("\n") == bars


def test_legend_hides_lines(seen: dict[str, Any]) -> None:
    assert seen["legend"] == [12, "false"]
    assert seen["lines"] == [12, 11, 0]


def test_the_values_of_a_chart_become_a_table_when_it_is_opened(seen: dict[str, Any]) -> None:
    assert (seen["rowsBefore"], seen["rows"], seen["columns"]) == (0, 40, 13)
    assert seen["valueHints"] == 1


def test_a_csv_file_of_bars_has_their_parts(seen: dict[str, Any]) -> None:
    assert seen["csv"][0] == ["part", "workers", "time of a step (ms)", "low", "high"]
    assert [row[:2] for row in seen["csv"][1:]] == [[part, n] for part in ("forward", "backward") for n in "12"]


def test_texts_from_records_are_drawn_literally(seen: dict[str, Any]) -> None:
    assert any(text.startswith("</script><script>document") for text in seen["texts"])


def test_a_click_on_a_heading_sorts_with_what_is_missing_last(seen: dict[str, Any]) -> None:
    assert seen["sorted"]["up"] == ["1", "2", "10"]
    assert seen["sorted"]["down"] == ["10", "2", "1"]
    assert seen["sorted"]["missing"] == ["5,735", "–", "–"]
    assert seen["sorted"]["text"][1:] == ["A", "b"]
    assert seen["ariaSort"] == ["ascending", "none", "none"]


@pytest.fixture
def study(tmp_path: Path) -> Document:
    """A report on the scaling of one job."""
    records = [scaling_record(workers, repeat, utilization=0.9) for workers in (1, 2, 4, 8) for repeat in range(3)]
    return build(gather([write_lines(tmp_path / "scaling.jsonl", records)]))


@pytest.mark.parametrize(
    ("width", "columns", "scheme", "color"),
    [(1400, 4, 0, "rgb(75, 163, 227)"), (1100, 2, 1, "rgb(0, 114, 178)"), (500, 1, 1, "rgb(0, 114, 178)")],
)
def test_small_charts_fit_the_window_and_its_colors(
    width: int, columns: int, scheme: int, color: str, study: Document, tmp_path: Path
) -> None:
    seen = _visit(study, tmp_path, width, f"--blink-settings=preferredColorScheme={scheme}")

    assert seen["errors"] == []
    assert seen["drawn"] == seen["charts"] == 4
    assert seen["columns"] == [columns]
    assert seen["pageWidth"][0] <= seen["pageWidth"][1] == width
    assert not seen["tooWide"]
    assert seen["color"] == color
    if width == 1400:  # arrow keys read the values
        assert seen["smallReadOut"].split("\n")[:2] == ["workers: 16", "ideal"]
        assert seen["smallToolbar"] == 0


def test_the_scaling_of_one_job_prints_on_one_sheet(study: Document, tmp_path: Path) -> None:
    pdf = tmp_path / "page.pdf"
    _browse(page.render(study), tmp_path, "--window-size=1400,1000", "--no-pdf-header-footer", f"--print-to-pdf={pdf}")

    content = pdf.read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", content)) == 1
    (size,) = re.findall(rb"/MediaBox\s*\[0 0 ([\d.]+) ([\d.]+)\]", content)
    assert [float(length) for length in size] == pytest.approx([595, 842], abs=1)  # A4 in points
