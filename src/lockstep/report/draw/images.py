"""Draw each chart of a report as a PNG and an SVG image for print; the same document gives the same bytes.

Text from records is drawn literally: matplotlib's math markup is disabled.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.files.atomic import replacing
from lockstep.report.document import Bars, Chart, Document, ValueRanges
from lockstep.report.draw.matplotlib_curves import draw_curves
from lockstep.report.draw.palette import LIGHT, color_count
from lockstep.report.draw.ticks import number, numbers_of, of_intervals

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 200
_WIDTH_INCHES, _HEIGHT_INCHES = 6.5, 4.0  # the width of the text on a page
_SETTINGS: Any = {  # the type of the keys differs between matplotlib versions
    "font.family": "DejaVu Sans",  # bundled with matplotlib, so the same on every machine
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LIGHT.muted,
    "axes.labelcolor": LIGHT.text,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "text.color": LIGHT.text,
    "xtick.color": LIGHT.muted,
    "ytick.color": LIGHT.muted,
    "xtick.labelcolor": LIGHT.text,
    "ytick.labelcolor": LIGHT.text,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "hatch.linewidth": 0.4,
    "text.parse_math": False,
    "svg.hashsalt": "lockstep",
}
_HATCHES = ("", "////", "", "....", "", "xxxx", "", "\\\\\\\\")
_FEW_LINES = 8
_MOST_IN_LEGEND = 20
_NAME_LENGTH = 36  # next to the axes
_LONG_NAME = 70  # below the axes
_Item = TypeVar("_Item")


def write(document: Document, folder: Path) -> list[Path]:
    """Draw each chart as KEY.png and KEY.svg, replacing files atomically.

    Returns:
        The paths written, in the order of the document.

    Raises:
        OSError: The folder cannot be created or written.
    """
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    count = color_count(document)
    files: list[Path] = []
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # A run's name may have characters that the font lacks; they are drawn as boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        for part in (part for section in document.sections for part in section.parts):
            if isinstance(part, Chart):
                files += _save(_draw_chart(part, LIGHT.line_colors(part, count)), folder, part.key)
            elif isinstance(part, Bars):
                files += _save(_draw_bars(part), folder, part.key)
            elif isinstance(part, ValueRanges):
                files += _save(_draw_intervals(part), folder, part.key)
    return files


def _save(figure: Figure, folder: Path, key: str) -> list[Path]:
    files = []
    # No date and version, so that the same document gives the same bytes.
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        path = folder / f"{key}.{suffix}"
        with replacing(path, shared=True) as partial:
            figure.savefig(partial, format=suffix, dpi=_DPI, metadata=metadata)
        files.append(path)
    return files


def _figure(part: Chart | Bars) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(_short(part.title, 80), pad=10)
    axes.set_xlabel(_short(part.x_label, 80))
    axes.set_ylabel(_short(part.y_label, 50))
    return figure, axes


def _draw_chart(chart: Chart, colors: Sequence[str]) -> Figure:
    figure, axes = _figure(chart)
    handles = draw_curves(axes, chart, colors)
    if handles:
        _add_legend(figure, handles)
    else:
        _say_empty(axes)
    return figure


def _draw_bars(bars: Bars) -> Figure:
    from matplotlib.ticker import FuncFormatter

    figure, axes = _figure(bars)
    if not bars.categories:
        _say_empty(axes)
        return figure
    positions, floor = range(len(bars.categories)), [0.0] * len(bars.categories)
    handles: list[tuple[str, Artist]] = []
    for index, (name, values) in enumerate(bars.stacks):
        color, hatch = LIGHT.stacks[index % len(LIGHT.stacks)], _HATCHES[index % len(_HATCHES)]
        drawn = axes.bar(positions, values, 0.62, floor, color=color, edgecolor="white", linewidth=0.5, hatch=hatch)
        floor = [low + value for low, value in zip(floor, values, strict=True)]
        handles.insert(0, (name, drawn[0]))  # top to bottom, in the order of the bars
    if bars.totals is not None:
        whole = axes.hlines(
            bars.totals, [x - 0.38 for x in positions], [x + 0.38 for x in positions], LIGHT.text, linewidth=1.4
        )
        handles.append(("measured total", whole))
    axes.set_xticks(positions, [_short(name, 16) for name in bars.categories])
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, numbers_of(bars.y_label))))
    _add_legend(figure, handles, is_right=True)
    return figure


def _draw_intervals(part: ValueRanges) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, 1.1 + 0.27 * len(part.rows)), layout="constrained")
    axes = figure.add_subplot()
    name, value = part.reference
    positions, middles = range(len(part.rows)), [row.middle for row in part.rows]
    axes.axvline(value, color=LIGHT.text, linewidth=0.9, linestyle="--")
    axes.hlines(
        positions, [row.low for row in part.rows], [row.high for row in part.rows], LIGHT.lines[0], linewidth=1.6
    )
    axes.plot(middles, positions, "o", color=LIGHT.lines[0], markersize=5)
    axes.set_xscale("log" if part.is_wide else "linear")
    ticks = of_intervals(part)
    axes.set_xticks(ticks, [number(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(positions, [_short(row.name, _NAME_LENGTH) for row in part.rows])
    axes.set_ylim(len(part.rows) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(_short(part.x_label, 80))
    figure.suptitle(_short(part.title, 80), x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes.text(value, 1.01, _short(name, _NAME_LENGTH), transform=axes.get_xaxis_transform(), ha="center", fontsize=7.5)
    return figure


def _say_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=LIGHT.muted)
    axes.set(xticks=[], yticks=[])


def _add_legend(figure: Figure, handles: Sequence[tuple[str, Artist]], is_right: bool = False) -> None:
    """Add a legend outside the axes: below them for a few lines, to the right for many."""
    from matplotlib.lines import Line2D

    if len(handles) == 1 and not handles[0][0]:
        return
    shown = _evenly(handles, _MOST_IN_LEGEND)
    if len(shown) < len(handles):
        shown = [*shown, (f"and {len(handles) - len(shown)} more", Line2D([], [], linestyle="none"))]
    is_right = is_right or len(handles) > _FEW_LINES
    names = [_short(name, _NAME_LENGTH if is_right else _LONG_NAME) for name, _ in shown]
    if is_right:
        figure.legend([handle for _, handle in shown], names, loc="outside right upper", fontsize=7.5)
    else:
        columns = max(1, min(len(names), 4, 84 // (max(map(len, names)) + 9)))
        figure.legend([handle for _, handle in shown], names, loc="outside lower center", ncols=columns)


def _evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """Select at most `most` items at even distances, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _short(text: str, length: int) -> str:
    """Return the text as one line; if it is longer than `length`, its middle is replaced with an ellipsis."""
    # matplotlib omits names with a leading underscore from legends.
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split()) or " "
    line = f" {line}" if line.startswith("_") else line
    return line if len(line) <= length else f"{line[: length // 2]}…{line[-(length - length // 2 - 1) :]}"
