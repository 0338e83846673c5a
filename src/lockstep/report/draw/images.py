"""Draw each chart of a report as PNG, SVG and PDF images for print.

The same document gives the same bytes, except that the order of the fonts in a PDF may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Chart
from lockstep.report.draw import vega

_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # vl-convert contains the first, so PNG images are alike
_WIDTH, _HEIGHT = 480, 270
_SCALE = 2.5  # pixels of a PNG image per unit
_MAX_IN_LEGEND = 20
_NAME_PIXELS = 200  # next to the axes
_NAMES_PIXELS = 520  # of a row of names below the axes
_LEGEND = {"color": "color", "fill": "color", "shape": "symbol"}
_LETTER_PIXELS, _SYMBOL_PIXELS = 6.5, 50


def render(part: Chart | Bars) -> dict[str, bytes]:
    """Return the images of a chart by suffix."""
    import vl_convert

    svg = vl_convert.vegalite_to_svg(specification(part))
    png, pdf = vl_convert.svg_to_png(svg, scale=_SCALE), vl_convert.svg_to_pdf(svg)
    return {"png": png, "svg": svg.encode(), "pdf": pdf}


def specification(part: Chart | Bars) -> vega.Spec:
    """Return the Vega-Lite specification of an image, with title and legend."""
    drawing = vega.draw(part, vega.LIGHT)
    title = {"text": one_line(part.title), "anchor": "start", "frame": "group", "limit": _WIDTH, "offset": 12}
    style = vega.config(vega.LIGHT, _FONT) | {
        "title": {"fontSize": 14, "color": vega.LIGHT.text},
        "background": vega.LIGHT.page,
        "padding": 8,
    }
    image: vega.Spec = {"width": _WIDTH, "height": _HEIGHT, "title": title, "config": style}
    if drawing is None:
        return {**image, "data": {"values": [{}]}, "mark": "text", "encoding": {"text": {"value": "no data"}}}
    image |= drawing.spec
    if [series.name for series in drawing.series] != [""]:
        is_right = isinstance(part, Bars) or len(drawing.series) > vega.FEW_LINES
        label_pixels = _NAME_PIXELS if is_right else _NAMES_PIXELS
        names = [vega.shortened(series.name, label_pixels) for series in drawing.series]
        image["params"] = [each | ({"value": names} if each["name"] == "names" else {}) for each in image["params"]]
        legend = _legend(drawing.series, isinstance(part, Bars), is_right, label_pixels)
        image["layer"] = [*image["layer"], legend]
        image["resolve"] = {**image.get("resolve", {}), "legend": dict.fromkeys(_LEGEND, "independent")}
    return image


def _legend(series: Sequence[vega.DrawnSeries], is_bars: bool, is_right: bool, label_pixels: int) -> vega.Spec:
    """Return a layer without marks that has the legend: below the axes for a few lines, to the right for many."""
    shown = _evenly(len(series), _MAX_IN_LEGEND)
    longest = max(len(item.name) for item in series) * _LETTER_PIXELS + _SYMBOL_PIXELS
    columns = 1 if is_right else max(1, min(len(series), 4, int(_NAMES_PIXELS // longest)))
    columns = math.ceil(len(series) / math.ceil(len(series) / columns))  # rows of about equal length
    legend = {
        "title": None if len(shown) == len(series) else f"{len(shown)} of {len(series)}",
        "values": shown if not is_bars else shown[::-1],  # from top to bottom
        "labelExpr": "names[datum.value]",
        "labelLimit": label_pixels,
        "labelFontSize": 12,
        "labelOffset": 14,
        "symbolSize": 55,
        "symbolOpacity": 1,
        "symbolOffset": 12,
        "orient": "right" if is_right else "bottom",
        "columns": columns,
    }
    corner = {"x": {"value": 0}, "y": {"value": 0}}
    properties = {name: vega.of_series([getattr(item, field) for item in series]) for name, field in _LEGEND.items()}
    encoding = {name: {**property, "legend": legend} for name, property in properties.items()}
    return {"transform": [{"filter": "false"}], "mark": "point", "encoding": corner | encoding}


def _evenly(count: int, most: int) -> list[int]:
    """Select at most `most` of `count` numbers at even distances, including the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
