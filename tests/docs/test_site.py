"""The site is built without a warning, has every page in its navigation, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import site_texts
import yaml
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
    site_texts.main(folder / "site")
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


def test_every_page_is_there_as_markdown_that_llms_txt_lists(site: Path) -> None:
    listed = re.findall(r"\]\(([\w./-]+)\)", (site / "llms.txt").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
    for name in listed:
        assert "<!--" not in (site / name).read_text(), name


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
