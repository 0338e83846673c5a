"""Each code block of the documentation runs, or says why it cannot, and prints what the page says it prints."""

from __future__ import annotations

import json
import re
from difflib import unified_diff
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from command_lines import ours, refusal
from outputs import difference
from pages import ROOT, Block, blocks, pages
from sandbox import Sandbox

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT).with_suffix(""))) for page in pages()]
RUNNING = ("sh", "python")
UNCHECKED = ("text", "html", "diff")


@pytest.mark.parametrize("page", PAGES)
def test_main_command_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    _run(_to_main_command(page), Sandbox(tmp_path), request, by_hand=False)


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_all_commands_run_as_the_reader_starts_them(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    _run(blocks(page), Sandbox(tmp_path, cold=True), request, by_hand=True)


def _to_main_command(page: Path) -> list[Block]:
    """Return a page's blocks up to its main command, the first that runs, and the block with its output."""
    found = blocks(page)
    for at, block in enumerate(found, start=1):
        if _is_run(block, by_hand=False):
            return found[: at + 1] if at < len(found) and "output" in found[at].marks else found[:at]
    return []


def _run(steps: list[Block], sandbox: Sandbox, request: pytest.FixtureRequest, by_hand: bool) -> None:
    printed = None
    for block in steps:
        if "output" in block.marks and printed is not None:
            assert (why := difference(block.text, printed)) is None, f"{block}: {why}\nIt printed:\n{printed}"
        printed = None
        if "needs" in block.marks:
            sandbox.provide(block.marks["needs"], request.getfixturevalue("shared_data"))
        if "file" in block.marks:
            sandbox.write(block)
        elif _is_run(block, by_hand):
            printed = sandbox.run(block)


def _is_run(block: Block, by_hand: bool) -> bool:
    return (
        block.language in RUNNING
        and block.title is None
        and "not run" not in block.marks
        and (by_hand or "run by hand" not in block.marks)
    )


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").symlink_to(ROOT / "src/lockstep/config/recipes/digits.yaml")  # which pages write
    for block in blocks(page):
        if block.language == "sh":
            for name, words in ours(block.text):
                why = refusal(name, words, lambda: "".join(capsys.readouterr()))
                assert why is None, f"{block}: {name} {' '.join(words)}\n{why}"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_what_they_say(page: Path) -> None:
    previous = None
    for block in blocks(page):
        if block.title is not None:
            assert _is_in(block.text, (ROOT / block.title).read_text()), (
                f"{block}: these lines are not in {block.title}"
            )
        elif "between" in block.marks:
            assert block.text == _changes(*block.marks["between"].split()), f"{block}: these are not the changes"
        elif block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in (*RUNNING, *UNCHECKED), f"{block}: is this text, or sh? It says {block.language!r}"
        if "output" in block.marks:
            assert getattr(previous, "language", None) in RUNNING, f"{block}: there is no command before it"
        previous = block


def _changes(before: str, after: str) -> str:
    """The lines that differ between two scripts, without those of their docstrings."""
    old, new = ((ROOT / name).read_text().splitlines()[1:] for name in (before, after))
    return "\n".join(line for line in list(unified_diff(old, new, n=0, lineterm=""))[2:] if not line.startswith("@"))


def _is_in(excerpt: str, whole: str) -> bool:
    """Whether each run of lines between lines of `# ...` stands in the file, in this order, however deep it stands."""
    lines, position = whole.splitlines(), 0
    for part in re.split(r"^ *# \.\.\.$", excerpt, flags=re.MULTILINE):
        wanted = dedent(part.strip("\n")).splitlines()
        places = range(position, len(lines) - len(wanted) + 1)
        found = next(
            (at for at in places if dedent("\n".join(lines[at : at + len(wanted)])).splitlines() == wanted), None
        )
        if found is None or not wanted:
            return False
        position = found + len(wanted)
    return True
