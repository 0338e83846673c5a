"""RESULTS.md."""

from __future__ import annotations

from lockstep.report.document import Chart, Document, Line, Section, Table
from lockstep.report.draw.markdown import render


def test_the_document_is_written_in_its_order() -> None:
    chart = Chart("top1", "Top-1", "epoch", "top-1 (%)", [Line("a", [1], [2])], note="Of validation.")
    table = Table("t", "Best", ("run", "top-1"), [("a", 91.234), ("b", None)], ("", ".2f"))
    section = Section("Curves", "First line.\nSecond line.", [chart, table])
    assert render(Document("Title", [section], ["x is missing"], "made today")) == (
        "# Title\n\nmade today\n\n## Warnings\n\n- x is missing\n\n## Curves\n\nFirst line.\n\nSecond line.\n\n"
        "### Top-1\n\n![Top-1: top-1 (%) against epoch](figures/top1.png)\n\nOf validation.\n\n"
        "### Best\n\n| run | top-1 |\n| --- | ---: |\n| a | 91.23 |\n| b | – |\n"
    )


def test_names_cannot_break_tables_nor_become_marks() -> None:
    table = Table("t", "T", ("run",), [("a|b_c*<i>\n[x](y)",)], ("",))
    text = render(Document("T", [Section("S", parts=[table])]))
    assert render(Document("a~~b~~ &lt; $x$", [])).startswith("# a\\~\\~b\\~\\~ \\&lt; \\$x\\$\n")
    assert "| a\\|b\\_c\\*\\<i\\> \\[x\\](y) |" in text


def test_nothing_is_left_that_a_terminal_would_obey() -> None:
    odd = "a\x1b]0;x\x07b\u202ec\x00d\udcff"
    section = Section(odd, odd, [Table("t", odd, (odd,), [(odd,)], ("",)), Chart("c", odd, odd, odd, [])])
    text = render(Document(odd, [section], [odd], odd))
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    assert text.count("a\ufffd\\]0;x\ufffdb\ufffdc\ufffdd\ufffd") >= 8
    text.encode()
