from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import documents

from lockstep.files.jsonl import one_line
from lockstep.report.document import Chart, Document, Line, Section, Table
from lockstep.report.draw import page
from lockstep.report.draw.vega import DARK, LIGHT


class Tags(HTMLParser):
    """Every tag of a page with its attributes, and the page's title."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == [("title", {})]:
            self.title += data.strip()

    def named(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def _data(html: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall('<script type="application/json">(.*?)</script>', html)]


def test_the_page_asks_for_nothing() -> None:
    html = page.render(documents.of(documents.scaling(), documents.split(), documents.results()))
    tags = Tags(html)

    assert not [attributes for _, attributes in tags.tags if "src" in attributes or "style" in attributes]
    assert all((attributes["href"] or "").startswith("#") for _, attributes in tags.tags if "href" in attributes)
    assert not tags.named("link")
    own = html.replace(page.vega_scripts(), "")
    assert len(own) < 100_000
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", own)


def test_the_policy_allows_only_the_pages_scripts_and_styles() -> None:
    html = page.render(documents.of(documents.scaling()))
    (policy,) = [about["content"] for about in Tags(html).named("meta") if "http-equiv" in about]
    own = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", html, flags=re.DOTALL)

    assert (policy or "").startswith("default-src 'none'; ")
    assert "unsafe" not in (policy or "")
    for script, style in own:
        digest = base64.b64encode(hashlib.sha256((script or style).encode()).digest()).decode()
        assert f"'sha256-{digest}'" in (policy or "")
    assert (policy or "").count("sha256-") == len(own)


def test_text_of_records_is_never_markup() -> None:
    hostile, harmless = (Tags(page.render(document)) for document in (documents.hostile(), documents.hostile("word")))

    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert hostile.title == one_line(documents.HOSTILE)


def test_the_page_has_language_title_and_headings_in_order() -> None:
    document = Document(
        "Study", [Section("One", parts=[documents.results()]), Section("Two"), Section("Three")], made="today"
    )
    tags = Tags(page.render(document))

    assert tags.named("html") == [{"lang": "en"}]
    assert tags.title == "Study"
    assert [tag for tag, _ in tags.tags if re.fullmatch("h[1-6]", tag)] == ["h1", "h2", "h2", "h3", "h2", "h2"]
    assert {"#content", "#section-1", "#section-2", "#section-3"} == {about["href"] for about in tags.named("a")}
    ids = [about["id"] for _, about in tags.tags if "id" in about]
    assert len(ids) == len(set(ids))


def test_warnings_stand_before_the_content() -> None:
    html = page.render(Document("Study", [Section("One")], warnings=["run a: a line is half-written"]))

    assert html.index("half-written") < html.index("section-1")
    assert "Warnings" not in page.render(Document("Study", [Section("One")]))


def test_series_have_the_colors_of_the_style_sheet() -> None:
    line = Line("a", [1.0, 2.0], [3.0, 4.0], color=3)
    html = page.render(documents.of(Chart("c", "", "epoch", "loss", [line]), documents.many(runs=50, epochs=2)))
    few, many = _data(html)

    assert few["series"][0]["color"] == "var(--line-3)"
    assert many["series"][49]["color"] == "var(--line-1)"
    assert re.findall("--line-3: (#[0-9a-f]{6})", html) == [LIGHT.lines[3], DARK.lines[3]]


def test_a_chart_without_data_says_so() -> None:
    html = page.render(documents.empty())

    assert html.count("<p>No data.</p>") == 4
    assert _data(html) == []


def test_cells_sort_by_their_numbers_not_their_texts() -> None:
    table = Table("t", "T", ["name", "rate"], [["a", 1234.5], ["b", None], ["c", float("inf")]], ["", ",.0f"])
    cells = Tags(page.render(documents.of(table))).named("td")

    assert [cell.get("data-value") for cell in cells] == [None, "1234.5", None, None, None, None]
    assert ["nothing" in (cell.get("class") or "") for cell in cells] == [False, False, False, True, False, True]


def test_fifty_runs_of_a_thousand_epochs_add_less_than_vega() -> None:
    assert len(page.render(documents.of(documents.many(runs=50, epochs=1000)))) < 2 * len(page.vega_scripts())


def test_small_charts_are_in_a_row_without_the_keys_for_zooming() -> None:
    charts = [
        Chart(f"c{number}", "", "workers", "rate", [Line("a", [1, 2], [3, 4])], is_small=True) for number in (1, 2)
    ]
    html = page.render(documents.of(documents.results(), *charts))
    grid = html.index('<div class="grid">')

    assert html.index('id="results"') < grid < html.index('id="c1"') < html.index('id="c2"')
    assert html.count('<div class="grid">') == 1
    assert [data["canZoom"] for data in _data(html)] == [False, False]
    assert "drag to zoom" not in html
    assert "drag to zoom" in page.render(documents.of(documents.scaling()))
