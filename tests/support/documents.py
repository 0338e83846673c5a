"""Small report documents, some with hostile or missing content."""

from __future__ import annotations

from lockstep.report.document import Bars, Chart, Document, Line, Section, Table

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\u2028$\\frac{"


def of(*parts: Chart | Bars | Table) -> Document:
    """Return a document with one section."""
    return Document("A report", [Section("Figures", parts=parts)])


def scaling(key: str = "throughput") -> Chart:
    """Return a chart of throughput by workers, with a spread, the ideal line and a mark."""
    counts, rates = [1, 2, 4, 8], [722.0, 1440.0, 2925.0, 5735.0]
    low, high = [rate - 25 for rate in rates], [rate + 50 for rate in rates]
    return Chart(
        key,
        "Throughput",
        "workers",
        "throughput (images/s)",
        [
            Line("ideal", counts, [722.0 * count for count in counts], look="dashed", color=None),
            Line("measured", counts, rates, low, high, remark="±3 %"),
        ],
        "log2",
        "log2",
    )


def many(runs: int = 50, epochs: int = 100) -> Chart:
    """Return a chart with one curve per run."""
    x = list(range(1, epochs + 1))
    lines = [Line(f"run {run}", x, [run + 40 * epoch / epochs for epoch in x], color=run) for run in range(runs)]
    return Chart("many", "Accuracy", "epoch", "top-1 accuracy (%)", lines)


def split(key: str = "split") -> Bars:
    """Return a chart of the parts of a step by workers."""
    stacks = [("forward", [30.0, 31.0]), ("backward", [60.0, 62.0])]
    return Bars(key, "Where a step's time goes", "workers", "time of a step (ms)", ["1", "2"], stacks)


def results() -> Table:
    """Return a table with numbers, text and empty cells."""
    rows = [["b", 10, 5735.2], ["A", 2, None], [HOSTILE, 1, float("nan")]]
    return Table("results", "Results", ["run", "workers", "images/s"], rows, ["", "d", ",.0f"])


def hostile(text: str = HOSTILE) -> Document:
    """Return a document in which every text contains markup or a script."""
    lines = [Line(text, [1.0], [2.0]), Line("_", [1.0], [3.0])]
    chart = Chart("odd", text, text, text, lines, note=text)
    bars = Bars("odd-bars", text, text, text, [text], [(text, [1.0])], note=text)
    table = Table("odd-table", text, [text], [[text]], [""], text)
    return Document(text, [Section(text, text, [chart, bars, table])], [text], text)


def empty() -> Document:
    """Return a document with empty charts and tables."""
    nothing = Line("gaps", [1.0, 2.0], [None, float("nan")])
    below = Line("below zero", [1.0, 2.0], [-1.0, 0.0])
    return of(
        Chart("no-lines", "No lines", "epoch", "loss", []),
        Chart("no-values", "No values", "epoch", "loss", [nothing]),
        Chart("no-logarithms", "No logarithms", "epoch", "loss", [below], y_scale="log10"),
        Bars("no-bars", "No bars", "workers", "time (s)", [], []),
        Table("no-rows", "No rows", ["run"], [], [""]),
    )
