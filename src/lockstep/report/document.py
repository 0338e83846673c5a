"""The content of a report, independent of its rendering: sections of charts and tables.

Images (`images`), Markdown (`text`) and the page (`page`) are rendered from the same document, so they agree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Look = Literal["solid", "dashed", "dotted", "points"]
Scale = Literal["linear", "log2", "log10"]
MIN_BAND_POINTS = 5
Cell = str | float | int | None
Found = TypeVar("Found")


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        name: Label in the legend.
        x, y: Coordinates of the points, in the chart's units. None in `y` is a gap.
        low, high: Spread around each point, such as quartiles or an interval; None if not available.
        look: Dashed for predictions, limits and demands; dotted for ideals and validation; points for no line.
        color: Color number in the palette; a run has the same number in every chart. None: the text color, for
            reference lines such as ideal scaling.
        remark: Short text after the name, in parentheses.
        is_ideal: Whether the line shows the ideal of a series; it then has no markers.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    look: Look = "solid"
    color: int | None = 0
    is_ideal: bool = False
    remark: str = ""

    @property
    def spread(self) -> Literal["", "bands", "whiskers"]:
        """How to draw the spread: bands between enough points, else whiskers (vertical lines); "" if there is none."""
        if all(value is None for value in (*(self.low or ()), *(self.high or ()))):
            return ""
        return "whiskers" if self.look == "points" or len(self.x) < MIN_BAND_POINTS else "bands"

    @property
    def has_markers(self) -> bool:
        """Whether to draw markers: only for measured points, not for ideals or predictions."""
        return self.color is not None and self.look != "dashed" and not self.is_ideal


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes.

    Args:
        key: Base name of the image files, such as "throughput".
        x_label, y_label: Axis labels with units, such as "throughput (images/s)".
        note: One or two sentences on what the chart shows and how it was measured.
        from_zero: Whether a linear y axis starts at zero (for memory, throughput and time) or fits the values (for
            accuracy).
        is_small: Whether the page shows it in a row with the small charts next to it.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    note: str = ""
    from_zero: bool = False
    is_small: bool = False


@dataclass(frozen=True)
class Bars:
    """Stacked bars, such as the parts of a step's time for each number of workers.

    Args:
        stacks: Name and values (one per category) of each part, from bottom to top.
        colors: Color number of each part; empty: in the order of the parts.
        is_small: As for charts.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    categories: Sequence[str]
    stacks: Sequence[tuple[str, Sequence[float]]]
    note: str = ""
    colors: Sequence[int] = ()
    is_small: bool = False


@dataclass(frozen=True)
class Table:
    """A table of results.

    Args:
        columns: Headings with units.
        rows: Cells; numbers stay numbers so that the page can sort them; None is an empty cell.
        formats: Format spec of each column's numbers, such as ",.0f" or ".2f"; "" for text.
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
    """Return a table of (heading, format) columns; columns without any value are dropped."""
    kept = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    names, formats = [columns[index][0] for index in kept], [columns[index][1] for index in kept]
    return Table(key, title, names, [[row[index] for index in kept] for row in rows], formats, note)


@dataclass(frozen=True)
class Section:
    """A heading, its text and its parts; `text` is plain text with one paragraph per line."""

    title: str
    text: str = ""
    parts: Sequence[Chart | Bars | Table] = ()


@dataclass(frozen=True)
class Document:
    """The whole report.

    Args:
        warnings: Missing, truncated or unreadable inputs, one line each.
        made: When and by which version the report was generated.
    """

    title: str
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    made: str = ""

    @property
    def parts(self) -> list[Chart | Bars | Table]:
        return [part for section in self.sections for part in section.parts]


def show(value: Cell, format_spec: str) -> str:
    """Format a cell for display; None becomes a dash."""
    if value is None:
        return "–"
    return format(value, format_spec) if format_spec and not isinstance(value, str) else str(value)


def told_apart(names: Sequence[str], *details: Sequence[str]) -> Sequence[str]:
    """Return names, with details added, kind by kind, to those that would otherwise be equal."""
    for values in details:
        alike: dict[str, set[str]] = defaultdict(set)
        for name, value in zip(names, values, strict=True):
            alike[name].add(value)
        pairs = zip(names, values, strict=True)
        names = [", ".join(filter(None, pair)) if len(alike[pair[0]]) > 1 else pair[0] for pair in pairs]
    return names


def numbered(names: Sequence[str]) -> list[str]:
    """Append a number to each name that occurs more than once."""
    counts, alike, found = Counter[str](), Counter(names), list[str]()
    for name in names:
        counts[name] += 1
        found.append(f"{name} ({counts[name]})" if alike[name] > 1 else name)
    return found


def by_label(found: Mapping[tuple[str, str], Found]) -> dict[str, Found]:
    """Replace the keys (label, machine) with labels; the machine is added where labels would otherwise be equal."""
    names = told_apart([label for label, _ in found], [machine or "unknown machine" for _, machine in found])
    return dict(zip(numbered(names), found.values(), strict=True))
