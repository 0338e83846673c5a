"""Render the report as Markdown (RESULTS.md), with the charts as links to their PNG files."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Chart, Document, Section, Table, show

FIGURES = "figures"  # the folder of the images, next to RESULTS.md


def render(document: Document) -> str:
    """Return the document as GitHub Markdown, with a trailing newline."""
    blocks = [f"# {_plain(document.title)}", _plain(document.made)]
    if document.warnings:
        listed = "\n".join(f"- {_plain(warning)}" for warning in document.warnings)
        blocks += ["## Warnings", listed]
    for section in document.sections:
        blocks += _section(section)
    return "\n\n".join(block for block in blocks if block) + "\n"


def _section(section: Section) -> list[str]:
    blocks = [f"## {_plain(section.title)}", *(_plain(line) for line in section.text.splitlines())]
    for part in section.parts:
        blocks.append(f"### {_plain(part.title)}")
        blocks.append(_table(part) if isinstance(part, Table) else _image(part))
        blocks.append(_plain(part.note))
    return blocks


def _image(part: Chart | Bars) -> str:
    about = f"{part.title}: {part.y_label} against {part.x_label}"
    return f"![{_plain(about)}]({FIGURES}/{part.key}.png)"


def _table(table: Table) -> str:
    heads = [_cell(column) for column in table.columns]
    rules = ["---:" if spec else "---" for spec in table.formats]
    rows = [[_cell(show(value, spec)) for value, spec in zip(row, table.formats, strict=True)] for row in table.rows]
    return "\n".join(_row(cells) for cells in (heads, rules, *rows))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return the text as one line, without control characters and with Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_\[\]<>~&$])", r"\\\1", " ".join(one_line(text).split()))
