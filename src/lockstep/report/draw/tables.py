"""Write each table of a report as CSV, for spreadsheets, and as LaTeX, for papers and proposals."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.files.atomic import replacing
from lockstep.files.jsonl import one_line
from lockstep.report.document import Cell, Document, Table, show

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


def write(document: Document, folder: Path) -> list[Path]:
    """Write each table as KEY.csv and KEY.tex, replacing files atomically.

    Returns:
        The paths written, in the order of the document.

    Raises:
        OSError: The folder cannot be created or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for part in document.parts:
        if isinstance(part, Table):
            for suffix, text in (("csv", to_csv(part)), ("tex", to_latex(part))):
                files.append(folder / f"{part.key}.{suffix}")
                with replacing(files[-1], shared=True) as partial:
                    partial.write_text(text, encoding="utf-8")
    return files


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
