"""Render a report as Markdown with links to its charts, and its tables as CSV, for spreadsheets, and as LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Cell, Chart, Document, Section, Table, show

FIGURES = "figures"  # the folder of the images, next to RESULTS.md
_FORMULA = ("=", "+", "-", "@")  # a spreadsheet would take such a text for a formula
_ESCAPES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "'": r"\textquotesingle{}",
        "`": r"\textasciigrave{}",
        "–": r"\textendash{}",
    }
)


def to_markdown(document: Document) -> str:
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
    heads = [_markdown_cell(column) for column in table.columns]
    rules = ["---:" if spec else "---" for spec in table.formats]
    rows = [
        [_markdown_cell(show(value, spec)) for value, spec in zip(row, table.formats, strict=True)]
        for row in table.rows
    ]
    return "\n".join(_markdown_row(cells) for cells in (heads, rules, *rows))


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return the text as one line, without control characters and with Markdown and HTML markup escaped."""
    return re.sub(r"([\\`*_\[\]<>~&$])", r"\\\1", " ".join(one_line(text).split()))


def to_csv(table: Table) -> str:
    """Return the headings and rows, with numbers that are not rounded; missing values are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_csv_cell(cell) for cell in row] for row in (table.columns, *table.rows))
    return text.getvalue()


def _csv_cell(cell: Cell) -> str | float:
    if isinstance(cell, str):
        line = one_line(cell)
        return f"'{line}" if line.startswith(_FORMULA) else line
    return "" if cell is None or not math.isfinite(cell) else cell


def to_latex(table: Table) -> str:
    """Return a `tabular` of the package booktabs, with the title as a comment."""
    rows = [[show(cell, spec) for cell, spec in zip(row, table.formats, strict=True)] for row in table.rows]
    columns = "".join("r" if spec else "l" for spec in table.formats)
    return "\n".join(
        [
            f"% {one_line(table.title)}; needs \\usepackage{{booktabs}}",
            f"\\begin{{tabular}}{{{columns}}}",
            "\\toprule",
            _latex_row(table.columns),
            "\\midrule",
            *map(_latex_row, rows),
            "\\bottomrule",
            "\\end{tabular}\n",
        ]
    )


def _latex_row(cells: Sequence[str]) -> str:
    # "{}" keeps a cell that starts with "[" from being read as an option of the line before, and "--" two hyphens.
    escaped = (re.sub("-(?=-)", "-{}", one_line(cell).translate(_ESCAPES)) for cell in cells)
    return f"{{}}{' & '.join(escaped)} \\\\"
