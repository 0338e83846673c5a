"""The code blocks of the documentation, and the marks that control how tests run them.

`tests/docs/test_blocks.py` runs the blocks of a page one after another, in one empty folder with links to `benchmarks`,
`compat`, `docs`, `examples` and `tests`: `sh` by `bash -euo pipefail`, `python` as whole scripts. It stops after a
page's main command, the first block that runs; `pytest -m long` runs all blocks. HTML comments on the lines before a
block control this:

    <!-- not run: REASON -->      The block cannot run here. Its flags of lockstep and horovodrun are still checked.
    <!-- run by hand: REASON -->  It runs only with `pytest -m long`.
    <!-- needs: mnist -->         The page is skipped if that data is missing; also `cifar10`.
    <!-- setup: COMMAND -->       Run this before the block, to create files that the reader is assumed to have.
    <!-- exit: 2 -->              The exit code of its last command.
    <!-- file: train.py -->       Write the block to that file instead of running it.
    <!-- between: a.py b.py -->   Before a `diff` block: the lines that differ between the two scripts.
    <!-- output -->               Before a `text` block: the output of the block above. `...` matches anything. Numbers
                                  may differ by 2 %; those before a unit of time, rate or bytes are not compared.

A `python` block with a title, such as title="examples/tutorial/03_ddp.py", is an excerpt: its lines must be in that
file, and a line `# ...` stands for a gap. `yaml` and `json` must parse. Other `diff` and `text` blocks are not checked.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARKS = {  # name: whether a text follows
    "not run": True,
    "run by hand": True,
    "needs": True,
    "setup": True,
    "exit": True,
    "file": True,
    "between": True,
    "output": False,
}

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)(?P<rest>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_MARK = re.compile(r"^ *<!-- (?P<name>[a-z ]+?)(?:: (?P<text>.*))? -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its first line, language, title and text, and its marks with their texts."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Return all pages that users read."""
    return [*sorted(ROOT.glob("*.md")), ROOT / "compat/horovod/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the page's fenced blocks, in order.

    Raises:
        ValueError: A mark is unknown or lacks its text, a fence is not closed, or code is indented instead.
    """
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            end = _end(page, lines, number, fence)
            text = textwrap.dedent("\n".join(lines[number + 1 : end]))
            title = _TITLE.search(fence["rest"])
            yield Block(page, number + 1, fence["language"], title[1] if title else None, text, marks)
            number, marks = end, {}
        elif mark := _MARK.match(line):
            _check(page, number, mark)
            marks[mark["name"]] = mark["text"] or ""
        elif line.lstrip().startswith("<!--") and "reference_pages.py" not in line:
            raise ValueError(f"{page}:{number + 1}: this comment is no mark; tests/support/pages.py lists them")
        elif line.lstrip().startswith("~~~"):
            raise ValueError(f"{page}:{number + 1}: fence code with backticks")
        elif line.strip():
            marks = {}
            if line.startswith("    ") and not lines[number - 1].strip() and not _in_list(lines, number):
                raise ValueError(f"{page}:{number + 1}: this code is indented; fence it")
        number += 1


def _end(page: Path, lines: list[str], begin: int, fence: re.Match[str]) -> int:
    closing = fence["indent"] + fence["ticks"]
    for number in range(begin + 1, len(lines)):
        if lines[number].rstrip() == closing:
            return number
    raise ValueError(f"{page}:{begin + 1}: this block is not closed")


def _check(page: Path, number: int, mark: re.Match[str]) -> None:
    name = mark["name"]
    if name not in MARKS:
        raise ValueError(f"{page}:{number + 1}: there is no mark {name!r}; there are {', '.join(MARKS)}")
    if MARKS[name] and not mark["text"]:
        raise ValueError(f"{page}:{number + 1}: the mark {name!r} is to be followed by a colon and a text")


def _in_list(lines: list[str], number: int) -> bool:
    """Return whether an indented line belongs to a list, an admonition, a tab or a definition above it."""
    above = next((line for line in reversed(lines[:number]) if line.strip() and not line.startswith("  ")), "")
    return re.match(r"(\d+\.|[-*:]|!!!|\?\?\?\+?|===|:::) ", above) is not None
