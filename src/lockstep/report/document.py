"""What a report says, without saying how it is drawn: sections of charts and tables.

Images (`images`), Markdown (`markdown`) and the page (`page`) are drawn from the same document, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log2", "log10"]
Cell = str | float | int | None


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        name: As the legend has it.
        x, y: Of its points, in the chart's units. A None in `y` is a gap.
        low, high: The spread around each point, such as quartiles or an interval; None where there is none.
        look: dashed for what is predicted, limited or demanded, dotted for what is ideal and for validation beside
            training, points without a line.
        color: Its number in the palette; what belongs together (a run in every chart) keeps its number. None: the
            colour of text, for reference lines such as the ideal one.
        remark: A short text at the right of the axes, beside its end.
        is_ideal: Whether it is what a series would ideally be, which has no markers.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    look: Literal["solid", "dashed", "dotted", "points"] = "solid"
    color: int | None = 0
    is_ideal: bool = False
    remark: str = ""

    @property
    def has_markers(self) -> bool:
        """Markers stand for what was measured, not for an ideal or a prediction."""
        return self.color is not None and self.look != "dashed" and not self.is_ideal


@dataclass(frozen=True)
class Mark:
    """A remark at a place of the x axis, such as a knee at a node's boundary."""

    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes.

    Args:
        key: The name of its files, such as "throughput".
        x_label, y_label: With the unit, such as "throughput (images/s)".
        note: A sentence or two of what is drawn and how it was measured.
        from_zero: Whether a linear y axis starts at zero, as that of an amount does: memory, throughput, time. That of
            others, such as accuracy, is fitted to the values.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    marks: Sequence[Mark] = ()
    note: str = ""
    from_zero: bool = False


@dataclass(frozen=True)
class Bars:
    """Stacked bars: what a step's time consists of, by the number of workers.

    Args:
        stacks: The parts, from below, each with one value a category.
        totals: What the whole of each category was measured as, if that is known besides its parts.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    categories: Sequence[str]
    stacks: Sequence[tuple[str, Sequence[float]]]
    totals: Sequence[float] | None = None
    note: str = ""


@dataclass(frozen=True)
class ValueRange:
    """A measured value with the range in which it lies, such as a median ratio with its confidence interval."""

    name: str
    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class ValueRanges:
    """Values with their ranges, one below the other.

    Args:
        reference: What they are compared with, by name and value.
    """

    key: str
    title: str
    x_label: str
    rows: Sequence[ValueRange]
    reference: tuple[str, float]
    note: str = ""

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value that is drawn."""
        values = [self.reference[1], *(end for row in self.rows for end in (row.low, row.high))]
        return min(values), max(values)

    @property
    def is_wide(self) -> bool:
        """Whether the values, all above zero, need a logarithmic axis to be told apart."""
        low, high = self.ends
        return low > 0 and high > 5 * low


@dataclass(frozen=True)
class Table:
    """A table of results.

    Args:
        columns: Headings with units.
        rows: Numbers as numbers, so that the page can sort them; None where there is nothing.
        formats: For each column how its numbers are shown, such as ",.0f" or ".2f"; "" for text.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    formats: Sequence[str]
    note: str = ""


def filled_table(
    key: str, title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Cell]], note: str = ""
) -> Table:
    """Make a table of (heading, format) columns, without those in which no row has a value."""
    kept = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    names, formats = [columns[index][0] for index in kept], [columns[index][1] for index in kept]
    return Table(key, title, names, [[row[index] for index in kept] for row in rows], formats, note)


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it; `text` is plain, a paragraph a line."""

    title: str
    text: str = ""
    parts: Sequence[Chart | Bars | ValueRanges | Table] = ()


@dataclass(frozen=True)
class Document:
    """The whole report.

    Args:
        warnings: What was missing, half-written or could not be read, one line each.
        made: When and by what version it was made.
    """

    title: str
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    made: str = ""


def show(value: Cell, format_spec: str) -> str:
    """A cell as people read it."""
    if value is None:
        return "–"
    return format(value, format_spec) if format_spec and not isinstance(value, str) else str(value)
