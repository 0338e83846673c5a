"""Tables and figures of the pages match the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architecture import FIGURE, ORDER, draw
from command_lines import ours, refusal
from layers import LAYERS
from pages import ROOT

PAGES = ("old-scripts", "migrate-from-horovod", "migrate-from-ddp", "launching")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_tables_have_flags_that_exist(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [line for line in (ROOT / "docs" / "howto" / f"{page}.md").read_text().splitlines() if line.startswith("|")]
    codes = re.findall(r"`([^`]+)`", "\n".join(rows))
    commands = [code for code in codes if "..." not in code and re.search(r"(^|\s)(lockstep|horovodrun) ", code)]
    assert len(commands) >= 5
    for command in commands:
        for name, words in ours(command):
            why = refusal(name, words, lambda: "".join(capsys.readouterr()))
            assert why is None, f"{page}: {command}\n{why}"


PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()


def test_the_figure_is_drawn_from_the_imports() -> None:
    assert FIGURE.read_text() == draw(), "run `python tests/support/architecture.py`"


def test_every_package_is_in_the_figure() -> None:
    assert sorted(ORDER) == sorted(name for name, layer in LAYERS.items() if layer >= 1)


def test_page_names_every_package_and_its_layer() -> None:
    rows = {name: int(layer) for layer, name in re.findall(r"^\| ([1-9]) \| `([\w]+)", PAGE, flags=re.MULTILINE)}
    assert rows == {name: int(layer) for name, layer in LAYERS.items() if layer >= 1}


def test_the_files_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|yaml))`", PAGE):
        assert (ROOT / "src" / "lockstep" / name).is_file(), name


def test_promises_and_faults_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "reliability.md").read_text()
    promises = re.findall(r"(?m)^(\d)\. \*\*", page)
    assert re.findall(r"(?m)^(\d)\. `[\w/]+\.py::test_", page) == promises
    faults = page.partition("| fault |")[2].partition("\n\n")[0].splitlines()[2:]
    assert not [row for row in faults if not re.search(r"/test_\w+\.py \|$", row)]
    for file, test in re.findall(r"([a-z]+/[\w/]*test_\w+\.py)(?:::(test_\w+))?", page):
        assert f"def {test}" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"
