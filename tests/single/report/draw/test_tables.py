"""Tables as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import documents
import pytest

from lockstep.report.document import Table
from lockstep.report.draw import tables


def test_each_table_is_a_csv_and_a_latex_file(tmp_path: Path) -> None:
    files = tables.write(documents.of(documents.scaling(), documents.results()), tmp_path / "new")

    assert [path.name for path in files] == ["results.csv", "results.tex"]
    assert sorted((tmp_path / "new").iterdir()) == files


def test_csv_has_numbers_in_full_and_missing_ones_empty() -> None:
    rows = [["a, b", 1, 1 / 3], ["c", None, float("nan")]]
    text = tables.to_csv(Table("t", "T", ["name", "workers", "rate"], rows, ["", "d", ",.1f"]))

    read = list(csv.reader(io.StringIO(text)))
    assert read == [["name", "workers", "rate"], ["a, b", "1", repr(1 / 3)], ["c", "", ""]]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_csv_has_no_formulas_from_records(text: str) -> None:
    assert tables.to_csv(Table("t", "T", ["a"], [[text]], [""])) == f"a\n'{text}\n"


def test_latex_is_a_tabular_of_booktabs() -> None:
    rows = [["a", 1234.5, "1–2"], ["b", None, None]]
    text = tables.to_latex(Table("t", "Points", ["name", "rate (1/s)", "quartiles"], rows, ["", ",.1f", ">"]))

    assert text == (
        "% Points; needs \\usepackage{booktabs}\n"
        "\\begin{tabular}{lrr}\n"
        "\\toprule\n"
        "{}name & rate (1/s) & quartiles \\\\\n"
        "\\midrule\n"
        "{}a & 1,234.5 & 1\\textendash{}2 \\\\\n"
        "{}b & \\textendash{} & \\textendash{} \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
    )


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (r"\{}$", r"\textbackslash{}\{\}\$"),
        ("&#_%", r"\&\#\_\%"),
        ("~^", r"\textasciitilde{}\textasciicircum{}"),
        ("<>|", r"\textless{}\textgreater{}\textbar{}"),
        ("'`", r"\textquotesingle{}\textasciigrave{}"),
        ("a --b ---c", "a -{}-b -{}-{}-c"),
        ("\\end{tabular}\n\\input{x}", r"\textbackslash{}end\{tabular\} \textbackslash{}input\{x\}"),
    ],
)
def test_latex_escapes_special_characters(text: str, escaped: str) -> None:
    title, *lines = tables.to_latex(Table("t", f"50 %\n{text}", [text], [[text]], [""])).splitlines()

    assert title.startswith("% 50 %")  # a comment of one line
    assert [lines[2], lines[4]] == [f"{{}}{escaped} \\\\"] * 2
    assert len(lines) == 7
