"""The site is built without a warning, has every page in its navigation, and fetches nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from browser import browse
from commands import PROGRAMS, run
from pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    done = run([PROGRAMS / "zensical", "build", "--strict"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    written = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    navigation = re.findall(r"[\w./-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(navigation) == sorted(written)


def test_every_page_is_built_and_found_by_the_search(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()
    assert "all-reduce" in (site / "search.json").read_text()


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?(https?:)?//|<link[^>]+rel=\"?(?:stylesheet|preload)[^>]+href=\"?(?:https?:)?//"
    )
    assert not [page.name for page in site.rglob("*.html") if fetched.search(page.read_text())]


def test_links_into_pages_have_their_goals(site: Path) -> None:
    anchors = {page: set(re.findall(r'\bid="?([^" >]+)', page.read_text())) for page in site.rglob("*.html")}
    for page in anchors:
        if page.name == "404.html":
            continue
        for href in re.findall(r'<a[^>]+href="([^":]*#[^"]+)"', page.read_text()):
            name, _, anchor = href.partition("#")
            goal = (page.parent / name).resolve() if name else page
            assert anchor in anchors.get(goal, set()), f"{page.relative_to(site)}: {href}"


def test_pictures_are_there(site: Path) -> None:
    for page in site.rglob("*.html"):
        for source in re.findall(r'<img[^>]+src="([^":]+)"', page.read_text()):
            assert page.name == "404.html" or (page.parent / source).is_file(), f"{page.relative_to(site)}: {source}"


SEEN = """
addEventListener("load", () => setTimeout(() => {  // after the page's own listeners
  const inside = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.left >= 0 && box.right <= innerWidth;
  };
  const names = (selector) =>
    [...document.querySelectorAll(selector)].filter(inside).map((link) => link.textContent.trim());
  const lines = (span) => new Set([...span.getClientRects()].map((box) => Math.round(box.top))).size;
  const words = [...document.querySelectorAll(".md-content code .whole")];
  const frames = [...document.querySelectorAll(".md-content .md-typeset__scrollwrap")];
  const seen = {
    tables: frames.length,
    scrolling: frames.filter((frame) => frame.scrollWidth > frame.clientWidth).length,
    tabs: names(".md-tabs__link"),
    pages: names(".md-sidebar--primary .md-nav__link"),
    words: words.map((span) => span.textContent),
    broken: words.filter((span) => lines(span) > 1).map((span) => span.textContent),
    wider: document.documentElement.scrollWidth - innerWidth,
  };
  document.body.innerHTML = `<pre id="seen">${btoa(encodeURIComponent(JSON.stringify(seen)))}</pre>`;
}));
"""


def _seen(site: Path, name: str, width: int, profile: Path) -> dict[str, Any]:
    """What a reader sees of a page in a window of this width."""
    page = site / name
    copy = page.with_name(f"seen-{width}-{page.name}")
    copy.write_text(page.read_text().replace("</head>", f"<script>{SEEN}</script></head>"))
    try:
        html = browse(copy, profile, f"--window-size={width},900", "--dump-dom")
    finally:
        copy.unlink()
    (encoded,) = re.findall(r'<pre id="seen">([\w+/=]+)</pre>', html)
    return dict(json.loads(unquote(b64decode(encoded).decode())))


@pytest.mark.parametrize("width", [1100, 500])
def test_words_of_code_stay_whole_at_each_width(site: Path, tmp_path: Path, width: int) -> None:
    seen = _seen(site, "howto/launching.html", width, tmp_path)
    assert {"--prefix", "--max-restarts"} <= set(seen["words"])
    assert seen["broken"] == []
    assert seen["wider"] <= 0


@pytest.mark.parametrize("width", [1100, 500])
def test_tables_do_not_scroll_at_each_width(site: Path, tmp_path: Path, width: int) -> None:
    seen = _seen(site, "reference/launchers.html", width, tmp_path)
    assert seen["tables"] >= 2
    assert seen["scrolling"] == 0


def test_navigation_is_visible_in_a_window_of_1100_pixels(site: Path, tmp_path: Path) -> None:
    seen = _seen(site, "howto/launching.html", 1100, tmp_path)
    assert seen["tabs"] == ["Home", "Tutorial", "How-to", "Reference", "Explanation"]
    assert {"Training", "Launching", "From Horovod"} <= set(seen["pages"])
