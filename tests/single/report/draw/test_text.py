"""RESULTS.md, and tables as CSV and LaTeX."""

from __future__ import annotations

import csv
import io

import pytest

from lockstep.report.document import Chart, Document, Line, Section, Table
from lockstep.report.draw import text as texts


def test_csv_has_numbers_in_full_and_missing_ones_empty() -> None:
    rows = [["a, b", 1, 1 / 3], ["c", None, float("nan")]]
    text = texts.to_csv(Table("t", "T", ["name", "workers", "rate"], rows, ["", "d", ",.1f"]))

    read = list(csv.reader(io.StringIO(text)))
    assert read == [["name", "workers", "rate"], ["a, b", "1", repr(1 / 3)], ["c", "", ""]]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)"])
def test_csv_has_no_formulas_from_records(text: str) -> None:
    assert texts.to_csv(Table("t", "T", ["a"], [[text]], [""])) == f"a\n'{text}\n"


def test_latex_is_a_tabular_of_booktabs() -> None:
    rows = [["a", 1234.5, "1–2"], ["b", None, None]]
    text = texts.to_latex(Table("t", "Points", ["name", "rate (1/s)", "quartiles"], rows, ["", ",.1f", ">"]))

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
    title, *lines = texts.to_latex(Table("t", f"50 %\n{text}", [text], [[text]], [""])).splitlines()

    assert title.startswith("% 50 %")  # a comment of one line
    assert [lines[2], lines[4]] == [f"{{}}{escaped} \\\\"] * 2
    assert len(lines) == 7


def test_the_document_is_written_in_its_order() -> None:
    chart = Chart("top1", "Top-1", "epoch", "top-1 (%)", [Line("a", [1], [2])], note="Of validation.")
    table = Table("t", "Best", ("run", "top-1"), [("a", 91.234), ("b", None)], ("", ".2f"))
    section = Section("Curves", "First line.\nSecond line.", [chart, table])
    assert texts.to_markdown(Document("Title", [section], ["x is missing"], "made today")) == (
        "# Title\n\nmade today\n\n## Warnings\n\n- x is missing\n\n## Curves\n\nFirst line.\n\nSecond line.\n\n"
        "### Top-1\n\n![Top-1: top-1 (%) against epoch](figures/top1.png)\n\nOf validation.\n\n"
        "### Best\n\n| run | top-1 |\n| --- | ---: |\n| a | 91.23 |\n| b | – |\n"
    )


def test_names_cannot_break_tables_nor_become_marks() -> None:
    table = Table("t", "T", ("run",), [("a|b_c*<i>\n[x](y)",)], ("",))
    text = texts.to_markdown(Document("T", [Section("S", parts=[table])]))
    assert texts.to_markdown(Document("a~~b~~ &lt; $x$", [])).startswith("# a\\~\\~b\\~\\~ \\&lt; \\$x\\$\n")
    assert "| a\\|b\\_c\\*\\<i\\> \\[x\\](y) |" in text


def test_nothing_is_left_that_a_terminal_would_obey() -> None:
    odd = "a\x1b]0;x\x07b\u202ec\x00d\udcff"
    section = Section(odd, odd, [Table("t", odd, (odd,), [(odd,)], ("",)), Chart("c", odd, odd, odd, [])])
    text = texts.to_markdown(Document(odd, [section], [odd], odd))
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    assert text.count("a\ufffd\\]0;x\ufffdb\ufffdc\ufffdd\ufffd") >= 8
    text.encode()
