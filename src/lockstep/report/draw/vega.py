"""Charts as Vega-Lite specifications, which are plain data; the page and the images share them.

Texts from records are titles and values of parameters, never names of fields or parts of expressions, so they are drawn
literally.

The first six colors are from Okabe and Ito ("Color Universal Design", 2008), without black (used for text) and yellow
(too light for white paper). The last two are from Tol ("Colour Schemes", 2021). More lines repeat the colors, with
other markers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Chart, Line, Scale

Spec = dict[str, Any]

FEW_LINES = 8
LINES = "lines"  # the name of the layer of lines
_FEW_POINTS = 40  # a longer line has markers only at some points
_MARKERS_A_LINE = 8
_FEW_TICKS = 9
_X_DIGITS, _Y_DIGITS = 9, 5
_NAME_PIXELS, _LETTER_PIXELS = 150, 6
_DASHES = {"solid": [1, 0], "dashed": [6, 4], "dotted": [2, 3], "points": [1, 0]}
_MARKERS = (  # SVG paths; seven markers and eight colors: a pair repeats after 56 lines
    "M-1,0A1,1,0,1,0,1,0A1,1,0,1,0,-1,0Z",
    "M-.85,-.85H.85V.85H-.85Z",
    "M0,-1.2L1.2,0L0,1.2L-1.2,0Z",
    "M0,-1.1L1.05,.8H-1.05Z",
    "M0,1.1L1.05,-.8H-1.05Z",
    "M-.4,-1.1H.4V-.4H1.1V.4H.4V1.1H-.4V.4H-1.1V-.4H-.4Z",
    "M0,-.5L.6,-1.1L1.1,-.6L.5,0L1.1,.6L.6,1.1L0,.5L-.6,1.1L-1.1,.6L-.5,0L-1.1,-.6L-.6,-1.1Z",
)
_STROKES = {
    "solid": "M-3,0H3",
    "dashed": "M-3,0H-1.6M-.7,0H.7M1.6,0H3",
    "dotted": "M-3,0h.5M-1.9,0h.5M-.8,0h.5M.3,0h.5M1.4,0h.5M2.5,0h.5",
    "points": "",
}
_BLOCK = "M-2,-1.4H2V1.4H-2Z"

# Labels of axes: 1,234, 2.5M and 0.05; of seconds, 300µ.
_PLAIN = (
    "abs(datum.value) >= 1e6 ? format(datum.value, '.4~s') : "
    "format(datum.value, abs(datum.value) >= 1000 ? ',.6~r' : '.4~g')"
)
_SECONDS = f"datum.value > 0 && datum.value < 0.9999e-3 ? format(datum.value, '.4~s') : {_PLAIN}"

_SHOWN: list[Spec] = [{"filter": "indexof(hidden, datum.s) < 0"}, {"flatten": ["x", "y", "low", "high"]}]
_NEIGHBORS = [
    {"op": operation, "field": field, "as": f"{field}_{operation}"} for operation in ("lag", "lead") for field in "xy"
]
_IN_VIEW: list[Spec] = [  # with one point beyond each end
    {"window": [*_NEIGHBORS, {"op": "row_number", "as": "number"}], "groupby": ["s"]},
    {
        "filter": "view[0] == null || ((datum.x_lead == null ? datum.x : datum.x_lead) >= view[0] && "
        "(datum.x_lag == null ? datum.x : datum.x_lag) <= view[1])"
    },
]
# Points between gaps, which no line shows, and every n-th of others; shifted, so that those of close lines differ.
_MARKED = "(datum.y_lag == null && datum.y_lead == null) || (datum.number + datum.s) % datum.every == 0"
_FOCUS = {"condition": {"test": "focus != null && focus != datum.s", "value": 0.15}, "value": 1}


@dataclass(frozen=True)
class Palette:
    """The colors for one background, as "#rrggbb".

    Args:
        lines: Colors of lines; more lines repeat them.
        stacks: Colors of the parts of stacked bars; neighbors differ in lightness, for grayscale prints. None is among
            the first two colors of lines, which may be on the same page.
        text: Color of reference lines.
        muted: Color of axes.
        page: Color of the background.
        grid: Color of grid lines.
    """

    lines: Sequence[str]
    stacks: Sequence[str]
    text: str
    muted: str
    page: str
    grid: str


LIGHT = Palette(
    lines=("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288", "#882255"),
    stacks=("#56b4e9", "#00664a", "#e69f00", "#b2182b", "#8fd0b8", "#5b5b5b", "#cc79a7", "#332288"),
    text="#1f2328",
    muted="#59636e",
    page="#ffffff",
    grid="#d9dee3",
)
DARK = Palette(
    lines=("#4ba3e3", "#ff8c4b", "#2cc795", "#e79ac6", "#f2b53c", "#93d5ff", "#a99bff", "#e2709f"),
    stacks=("#93d5ff", "#1f9d76", "#f2b53c", "#dd4b4b", "#a8e0cc", "#8b949e", "#e79ac6", "#8f7ff0"),
    text="#e6edf3",
    muted="#9aa4af",
    page="#12161b",
    grid="#2f3740",
)


class DrawnSeries(NamedTuple):
    """A line of a chart or a part of stacked bars, as legends show it.

    Args:
        symbol: An SVG path around the origin, 6 wide and 3 high.
    """

    name: str
    color: str
    symbol: str


class Drawing(NamedTuple):
    """A chart's specification, and its series.

    The specification's data have one row per series: its number `s`, `x` and `y`, and `low` and `high` if it has a
    spread. Its parameters are `hidden` (the numbers of hidden series), `view` (the range of x; nulls for all), `whole`
    (whether y shows 0 to 100) and `focus` (the number of the series that is not faded).
    """

    spec: Spec
    series: Sequence[DrawnSeries]


def draw(part: Chart | Bars, palette: Palette) -> Drawing | None:
    """Return the drawing of a chart, without title and legend; None if it has no points."""
    return _draw_chart(part, palette) if isinstance(part, Chart) else _draw_bars(part, palette)


def config(palette: Palette, font: str) -> Spec:
    """Return the style of axes and texts."""
    colors = {"domainColor": palette.muted, "tickColor": palette.muted, "gridColor": palette.grid}
    titles = {"titleColor": palette.text, "titleFontWeight": "normal", "titleFontSize": 13, "titleLimit": 300}
    labels = {"labelColor": palette.text, "labelFontSize": 12, "labelOverlap": "greedy"}
    labels |= {"labelSeparation": 4, "labelFlush": False}
    return {
        "aria": False,  # Vega-Lite's descriptions of marks put titles into expressions
        "background": None,
        "font": font,
        "view": {"stroke": None},
        "axis": {**colors, **titles, **labels},
        "text": {"color": palette.text, "fontSize": 12},
        "rule": {"color": palette.text},
    }


def of_series(values: Sequence[object]) -> Spec:
    """Return the encoding of a property of the series, such as their colors."""
    scale = {"domain": list(range(len(values))), "range": values}
    return {"field": "s", "type": "nominal", "scale": scale, "legend": None}


def _draw_chart(chart: Chart, palette: Palette) -> Drawing | None:
    drawn = [(line, row) for line in chart.lines if (row := _row(line, chart.x_scale, chart.y_scale))]
    if not drawn:
        return None
    rows = [{"s": index, **row} for index, (_, row) in enumerate(drawn)]
    series = [_series(line, palette) for line, _ in drawn]
    measured = {x for (line, row) in drawn if line.has_markers for x in row["x"]}
    places = sorted(measured | {x for row in rows for x in (row["x"] if not measured else (row["x"][-1],))})
    x, y = _x_axis(chart, places), _y_axis(chart, rows)
    is_crowded = len(rows) > FEW_LINES
    stroke = {"type": "line", "strokeWidth": 1 if is_crowded else 1.8}
    point = {"type": "point", "filled": True, "size": 18 if is_crowded else 38}
    spread = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    marker = {"field": "marker", "type": "nominal", "scale": None}
    dashes = of_series([_DASHES[line.look] for line, _ in drawn])
    lines = _layer(stroke, "datum.look != 'points'", x=x, y=y, strokeDash=dashes, opacity=_FOCUS)
    layers = [
        {"name": LINES, **lines},
        _layer(point, _MARKED, y=y, shape=marker, opacity=_FOCUS),
    ]
    for kind, mark in (("bands", {"type": "area", "opacity": 0.17}), ("whiskers", {"type": "rule"})):
        if any(row["spread"] == kind for row in rows):
            layers.append(_layer(mark, f"datum.spread == '{kind}'", **spread))
    spec = {
        "params": _params(series),
        "data": {"values": rows},
        "transform": [*_SHOWN, *_IN_VIEW],
        "encoding": {"x": {**x, "axis": None}, "color": of_series([item.color for item in series])},
        "layer": layers,
        "resolve": {"axis": {"x": "independent"}},
    }
    return Drawing(spec, series)


def _row(line: Line, x_scale: Scale, y_scale: Scale) -> Spec | None:
    """Return a line's data in the order of x, without what the scales cannot show; None if nothing remains.

    A point with an invalid x is dropped, and an invalid y becomes a gap.
    """
    order = sorted((index for index, x in enumerate(line.x) if _fits(x, x_scale)), key=line.x.__getitem__)

    def values(numbers: Sequence[float | None] | None) -> list[float | None]:
        return _rounded([numbers[index] for index in order] if numbers else [], _Y_DIGITS, y_scale)

    x = _rounded([line.x[index] for index in order], _X_DIGITS)
    y, low, high = map(values, (line.y, line.low, line.high))
    if all(value is None for value in y):
        return None
    every = max(1, len(x) // _MARKERS_A_LINE) if len(x) > _FEW_POINTS else 1
    return {
        "x": x,
        "y": y,
        "low": low,
        "high": high,
        "look": line.look,
        "spread": line.spread,
        "every": 1 if line.look == "points" else every if line.has_markers else 0,
        "marker": _marker(line),
    }


def _fits(value: float | None, scale: Scale) -> bool:
    return value is not None and math.isfinite(value) and (scale == "linear" or value > 0)


def _rounded(values: Sequence[float | None], digits: int, scale: Scale = "linear") -> list[float | None]:
    """Round values to `digits` significant digits, to keep the page small; None if the scale cannot show a value."""
    rounded = (float(f"{value:.{digits}g}") if _fits(value, scale) else None for value in values)
    return [
        int(value) if value is not None and abs(value) < 1e15 and value.is_integer() else value for value in rounded
    ]


def _marker(line: Line) -> str:
    return _MARKERS[(line.color or 0) % len(_MARKERS)]


def _series(line: Line, palette: Palette) -> DrawnSeries:
    color = palette.text if line.color is None else palette.lines[line.color % len(palette.lines)]
    marker = _marker(line) if line.has_markers or line.look == "points" else ""
    name = f"{line.name} ({line.remark})" if line.remark else line.name
    return DrawnSeries(one_line(name), color, _STROKES[line.look] + marker)


def _x_axis(chart: Chart, values: Sequence[float]) -> Spec:
    """Return the x axis; one of few measured values, such as worker counts, has its ticks at these."""
    scale = _scale(chart.x_scale) | {"padding": {"expr": "view[0] == null ? 8 : 0"}}
    scale |= {"domainMin": {"expr": "view[0]"}, "domainMax": {"expr": "view[1]"}}
    axis = _labels(chart.x_label, "width / 80")
    are_counts = chart.x_scale != "log10" and all(float(x).is_integer() for x in values)
    if len(values) == 1 or (are_counts and len(values) <= _FEW_TICKS):
        axis["values"] = values
        del axis["tickCount"]  # it would thin them
    elif chart.x_scale != "linear":
        axis |= _log_ticks(values[0], values[-1])
    elif are_counts:
        axis["tickMinStep"] = 1.5  # at least 1, as the axis is wider than the values; there is no epoch 1.5
    return {"field": "x", "type": "quantitative", "title": one_line(chart.x_label), "scale": scale, "axis": axis}


def _y_axis(chart: Chart, rows: Sequence[Spec]) -> Spec:
    """Return the y axis, fitted to the values in view, but not below zero; from zero if `chart.from_zero`."""
    scale, axis = _scale(chart.y_scale), _labels(chart.y_label, "height / 45")
    if chart.y_scale == "linear":
        scale |= {"nice": True, "zero": chart.from_zero}
        scale |= {"domainMin": {"expr": "whole ? 0 : null"}, "domainMax": {"expr": "whole ? 100 : null"}}
    else:
        known = [y for row in rows for y in row["y"] if y is not None]
        scale["padding"] = 12
        axis |= _log_ticks(min(known), max(known))
    return {"field": "y", "type": "quantitative", "title": one_line(chart.y_label), "scale": scale, "axis": axis}


def _scale(scale: Scale) -> Spec:
    return {"type": "linear", "nice": False, "zero": False} if scale == "linear" else {"type": "log", "nice": False}


def _labels(label: str, ticks: str) -> Spec:
    """Return the number format of an axis and an expression for its number of ticks."""
    numbers = _SECONDS if "(s)" in label else _PLAIN
    return {"labelExpr": numbers, "tickCount": {"expr": f"ceil({ticks})"}}


def _log_ticks(low: float, high: float) -> Spec:
    """Return the ticks of a logarithmic axis at 1, 2 and 5 times powers of ten; many decades have only the powers."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1,) if high >= 2000 * low else (1, 2, 5)
    values = [value for decade in decades for digit in digits if low <= (value := float(f"{digit}e{decade}")) <= high]
    return {"values": values} if len(values) >= 3 else {}


def _layer(mark: Spec, test: str, **encoding: Spec) -> Spec:
    clipped = {**mark, "clip": {"expr": "view[0] != null"}}
    return {"transform": [{"filter": test}], "mark": clipped, "encoding": encoding}


def _params(series: Sequence[DrawnSeries], **values: object) -> list[Spec]:
    names = [item.name for item in series]
    known = {"names": names, "hidden": [], "view": [None, None], "whole": False, "focus": None, **values}
    return [{"name": name, "value": value} for name, value in known.items()]


def shortened(name: str, pixels: float) -> str:
    """Return a name that fits a width; the middle is left out, since names of runs often differ at their ends."""
    letters = int(pixels / _LETTER_PIXELS)
    return name if len(name) <= letters else f"{name[: letters // 2]}…{name[letters // 2 + 1 - letters :]}"


def _draw_bars(bars: Bars, palette: Palette) -> Drawing | None:
    if not bars.categories or not bars.stacks:
        return None
    series, values = [], [values for _, values in bars.stacks]
    for index, (name, _) in zip(bars.colors or range(len(bars.stacks)), bars.stacks, strict=True):
        series.append(DrawnSeries(one_line(name), palette.stacks[index % len(palette.stacks)], _BLOCK))
    places, bare = list(range(len(bars.categories))), {"labelAngle": 0, "ticks": False, "grid": False}
    categories = {**bare, "labelExpr": "categories[datum.value]", "labelLimit": _NAME_PIXELS}
    rows = [{"s": s, "x": places, "y": _rounded(y, _Y_DIGITS), "low": [], "high": []} for s, y in enumerate(values)]
    x = {"field": "x", "type": "ordinal", "title": one_line(bars.x_label), "scale": {"domain": places}}
    y = {
        "field": "y",
        "type": "quantitative",
        "title": one_line(bars.y_label),
        "axis": _labels(bars.y_label, "height / 45"),
    }
    bar = {"type": "bar", "width": {"band": 0.7}, "stroke": palette.page, "strokeWidth": 0.5}
    spec = {
        "params": _params(series, categories=[one_line(name) for name in bars.categories]),
        "data": {"values": rows},
        "transform": _SHOWN,
        "encoding": {"x": {**x, "axis": categories}, "y": y, "color": of_series([item.color for item in series])},
        "layer": [_layer(bar, "true", order={"field": "s"}, opacity=_FOCUS)],
    }
    return Drawing(spec, series)
