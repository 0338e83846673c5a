"""The files around the code: the README, the workflows, the forms, and the links of the pages outside docs/."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import release
import yaml
from commands import PROGRAMS
from pages import ROOT

import lockstep

MAX_README_WORDS = 400  # of prose
GITHUB = ROOT / ".github"
SCHEMAS = {
    "vendor.github-workflows": sorted(GITHUB.glob("workflows/*.yml")),
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [PROGRAMS / "check-jsonschema", "--builtin-schema", schema, *files]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.cold
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_github_follow_their_schema(schema: str) -> None:
    done = _check(schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cold
def test_a_workflow_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    (tmp_path / "ci.yml").write_text(text.replace("runs-on:", "run-on:"))
    assert _check("vendor.github-workflows", tmp_path / "ci.yml").returncode == 1


def test_every_form_is_checked() -> None:
    checked = {path for paths in SCHEMAS.values() for path in paths}
    assert set(GITHUB.rglob("*.yml")) <= checked


def test_programs_that_workflows_run_are_there() -> None:
    for path in GITHUB.glob("workflows/*.yml"):
        for name in re.findall(r"(?:run: |python3? )((?:\.ci|tools)/[\w./]+)", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.name}: {name}"


def test_ci_runs_on_the_oldest_and_newest_python() -> None:
    versions = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    matrix = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == [versions[0], versions[-1]]


def test_bug_form_asks_for_what_doctor_prints() -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (field,) = (field for field in form["body"] if field.get("id") == "doctor")
    assert "`lockstep doctor --json`" in field["attributes"]["label"]
    assert field["validations"]["required"]


def test_readme_is_short() -> None:
    assert len(_prose(ROOT / "README.md").split()) <= MAX_README_WORDS


def test_roadmap_has_nothing_that_has_a_page() -> None:
    assert "](docs/" not in (ROOT / "ROADMAP.md").read_text()


def test_texts_describe_the_version_of_the_source() -> None:
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    release.check_texts(release.version(), changelog, citation)


def test_changelog_lists_the_modules_of_the_reference() -> None:
    listed = (ROOT / "CHANGELOG.md").read_text().rpartition("Scripts may import")[2]
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference/api").glob("*.md"))
    found = re.findall(r"^::: (lockstep[\w.]*)\.(\w+)$", pages, flags=re.MULTILINE)
    others = {module for module, name in found if name not in lockstep.__all__}
    others = {module for module in others if not module.startswith(("lockstep.hvd.", "lockstep.train."))}
    assert len(others) >= 10
    assert not [module for module in others if f"{module.rpartition('.')[2]}`" not in listed]


@pytest.mark.parametrize("page", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_of_the_pages_outside_docs_have_their_goals(page: str) -> None:
    for goal in re.findall(r"\]\(([^)\s]+)\)", _prose(ROOT / page)):
        name, _, anchor = goal.partition("#")
        path = ROOT / (name or page)
        assert path.is_file(), f"{page}: {goal}"
        assert not anchor or anchor in _anchors(path), f"{page}: {goal}"


def _prose(page: Path) -> str:
    """Return the page without its code blocks and comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
