"""tools/release.py refuses a tree that is not ready."""

from __future__ import annotations

from pathlib import Path

import pytest
import release

CITATION = "title: Lockstep\nversion: 1.2.0\n"
DATED = "# Changelog\n\n## 1.2.0, 2030-01-31\n\nText.\n"
PROJECT = {"urls": {"Documentation": "of the project"}}


@pytest.mark.parametrize(
    ("changelog", "citation", "message"),
    [
        ("# Changelog\n\n## 1.1.0\n", CITATION, "write a section `## 1.2.0`"),
        ("## 1.2.0\n" + "line\n" * 60 + "## 1.1.0\n", CITATION, "the section 1.2.0 has 61 lines; keep 60"),
        (DATED, "version: 1.1.0\n", "write `version: 1.2.0`"),
    ],
)
def test_texts_of_another_version_are_refused(changelog: str, citation: str, message: str) -> None:
    with pytest.raises(release.ReleaseError, match=message):
        release.check_texts("1.2.0", changelog, citation)


def test_texts_of_this_version_are_accepted() -> None:
    release.check_texts("1.2.0", "## 1.2.0\n" + "line\n" * 59 + "## 1.1.0\n" + "line\n" * 60, CITATION)


@pytest.mark.parametrize(
    ("changelog", "project", "changed", "tags", "message"),
    [
        (DATED, PROJECT, "?? new.py", [], "commit them:\n?? new.py"),
        ("## 1.2.0, not released yet\n", PROJECT, "", [], "date the section"),
        (DATED, PROJECT, "", ["v1.1.0", "v1.2.0"], "v1.2.0 is tagged; raise __version__"),
    ],
    ids=["changes", "date", "tag"],
)
def test_an_upload_is_refused_with_the_fix(
    changelog: str, project: dict[str, object], changed: str, tags: list[str], message: str
) -> None:
    (found,) = release.obstacles("1.2.0", changelog, project, changed, tags)
    assert message in found


def test_an_upload_without_addresses_is_refused() -> None:
    address, links = release.obstacles("1.2.0", DATED, {}, "", [])
    assert "add [project.urls]" in address
    assert "PyPI follows no relative link" in links


def test_a_dated_tree_with_addresses_may_be_uploaded() -> None:
    assert not list(release.obstacles("1.2.0", DATED, PROJECT, "", ["v1.1.0"]))


def test_builds_that_differ_are_refused(tmp_path: Path) -> None:
    files = []
    for folder, content in (("first", "a"), ("again", "b")):
        (tmp_path / folder).mkdir()
        for name, text in (("same.whl", "same"), ("other.tar.gz", content)):
            (tmp_path / folder / name).write_text(text)
        files.append(sorted((tmp_path / folder).iterdir()))
    release.check_equal(files[0], files[0])
    with pytest.raises(release.ReleaseError, match=r"differ: other\.tar\.gz$"):
        release.check_equal(*files)
    with pytest.raises(release.ReleaseError, match=r"differ: other\.tar\.gz$"):
        release.check_equal(files[0], files[0][1:])


def test_first_command_of_the_readme_trains_on_two_workers() -> None:
    assert release.first_command()[:4] == ["lockstep", "train", "-np", "2"]
