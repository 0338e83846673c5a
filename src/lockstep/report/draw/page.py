"""Render the report as one self-contained HTML page: it needs no server, network or other file.

Scripts, styles and data are inline. A content security policy allows only these scripts and styles, by their hashes,
and forbids all requests. Everything from records is escaped here, and the scripts insert it as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lockstep.files.fields import one_line
from lockstep.report.document import Bars, Cell, Chart, Document, Section, Table, ValueRanges, show
from lockstep.report.draw.interval_svg import draw
from lockstep.report.draw.matplotlib_curves import drawable
from lockstep.report.draw.palette import DARK, LIGHT, Palette, color_count
from lockstep.report.draw.ticks import measured, numbers_of

_EARLY_SCRIPTS = ("theme.js",)  # run before the page is displayed
_SCRIPTS = ("uplot/uPlot.iife.min.js", "numbers.js", "parts.js", "curves.js", "bars.js", "tables.js", "start.js")
_STYLES = ("uplot/uPlot.min.css", "page.css")
_MARKERS = 7
_X_DIGITS, _Y_DIGITS = 9, 5
_HELP = (
    "Charts: drag to zoom in, double-click to zoom out, and hover over a curve to read its values. Keyboard: arrow "
    "keys pan, + and − zoom, 0 shows the whole range. Click a name in a legend to hide its line."
)
_CURVE_KEYS = "Arrow keys pan, + and − zoom, 0 shows the whole range. The values are in the table below."
_BAR_KEYS = "Arrow keys select a bar. The values are in the table below."


def render(document: Document) -> str:
    """Return the complete page."""
    colors = color_count(document)
    style = "\n".join([*map(_static, _STYLES), _color_style(colors)])
    early, scripts = [_static(name) for name in _EARLY_SCRIPTS], [_static(name) for name in _SCRIPTS]
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy([*early, *scripts], style)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(document.title)}</title>
<style>{style}</style>
{_script_tags(early)}
</head>
"""
    body = f"""<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(document.title)}</h1>
<button type="button" id="theme" hidden aria-label="Switch between light and dark"></button>
<p class="made">{escape(document.made)}</p>
</header>
{_contents(document)}
<main id="content">
{_warnings(document.warnings)}
<p class="note help">{_HELP}</p>
<noscript><p>The charts need JavaScript. PNG and SVG images of them are in the figures folder.</p></noscript>
{"".join(_section(section, number, colors) for number, section in enumerate(document.sections, 1))}
</main>
{_script_tags(scripts)}
</body>
</html>
"""
    return head + body


def _static(name: str) -> str:
    return (files("lockstep.report") / "static" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _script_tags(scripts: Sequence[str]) -> str:
    return "\n".join(f"<script>{script}</script>" for script in scripts)


def _color_style(colors: int) -> str:
    def rule(selector: str, palette: Palette) -> str:
        named = {
            "text": palette.text,
            "muted": palette.muted,
            **{f"line-{number}": color for number, color in enumerate(palette.lines)},
            **{f"ramp-{number}": color for number, color in enumerate(palette.ramp_colors(colors))},
            **{f"stack-{number}": color for number, color in enumerate(palette.stacks)},
        }
        return f"{selector} {{ {' '.join(f'--{name}: {color};' for name, color in named.items())} }}"

    return rule(":root", LIGHT) + "\n" + rule(':root[data-theme="dark"]', DARK)


def _contents(document: Document) -> str:
    if len(document.sections) < 2:
        return ""
    links = "".join(
        f'<li><a href="#section-{number}">{escape(section.title)}</a></li>\n'
        for number, section in enumerate(document.sections, 1)
    )
    return f'<nav aria-labelledby="contents">\n<h2 id="contents">Contents</h2>\n<ul>\n{links}</ul>\n</nav>'


def _warnings(warnings: Sequence[str]) -> str:
    if not warnings:
        return ""
    lines = "".join(f"<li>{escape(warning)}</li>\n" for warning in warnings)
    return f'<section class="warnings" aria-label="Warnings">\n<h2>Warnings</h2>\n<ul>\n{lines}</ul>\n</section>'


def _section(section: Section, number: int, colors: int) -> str:
    text = "".join(f"<p>{escape(line)}</p>\n" for line in section.text.split("\n") if line.strip())
    parts = "".join(_part(part, colors) for part in section.parts)
    return f'<section>\n<h2 id="section-{number}">{escape(section.title)}</h2>\n{text}{parts}</section>\n'


def _part(part: Chart | Bars | ValueRanges | Table, colors: int) -> str:
    if isinstance(part, Table):
        return _table(part)
    return _intervals(part) if isinstance(part, ValueRanges) else _figure(part, colors)


def _intervals(part: ValueRanges) -> str:
    heading = f"<h3>{escape(part.title)}</h3>\n{_note(part.note)}"
    return f'<figure id="{escape(part.key)}">\n{heading}<div class="scroll">{draw(part)}</div>\n</figure>\n'


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>\n' if note else ""


def _figure(part: Chart | Bars, colors: int) -> str:
    """Return the figure element of a chart with its data; a script draws it."""
    data = _curve_data(part, colors) if isinstance(part, Chart) else _bar_data(part)
    heading = f"<h3>{escape(part.title)}</h3>\n"
    if data is None:
        return f'<figure id="{escape(part.key)}">\n{heading}{_note(part.note)}<p>No data.</p>\n</figure>\n'
    return f"""<figure id="{escape(part.key)}" data-chart>
{heading}{_note(part.note)}<div class="host"></div>
<details><summary>Values</summary></details>
<script type="application/json">{_json(data)}</script>
</figure>
"""


def _curve_data(chart: Chart, colors: int) -> dict[str, Any] | None:
    """Return the data with which the scripts draw a chart, or None if it has no points. Lines with equal x share it."""
    is_ramp = LIGHT.needs_ramp(chart)
    shared: dict[tuple[float | None, ...], int] = {}
    lines = []
    for line in chart.lines:
        curve = drawable(line, chart.x_scale, chart.y_scale)
        if not curve.x:
            continue
        order = sorted(range(len(curve.x)), key=curve.x.__getitem__)
        x = tuple(_rounded([curve.x[index] for index in order], _X_DIGITS))
        values = {
            name: _rounded([sequence[index] for index in order], _Y_DIGITS)
            for name, sequence in (("y", curve.y), ("low", curve.low), ("high", curve.high))
            if sequence
        }
        color = "text" if line.color is None else f"{'ramp' if is_ramp else 'line'}-{line.color}"
        marker = line.color % _MARKERS if line.color is not None and line.has_markers else None
        look = {"name": line.name, "look": line.look, "color": color, "marker": marker}
        if line.remark:
            look["remark"] = line.remark
        lines.append({**look, "x": shared.setdefault(x, len(shared)), **values})
    if not lines:
        return None
    return {
        **_common(chart, "curves", _CURVE_KEYS),
        "xScale": chart.x_scale,
        "yScale": chart.y_scale,
        "fromZero": chart.from_zero,
        "isShare": "(%)" in chart.y_label,
        "xPlaces": measured(chart),
        "marks": [{"x": mark.x, "text": mark.text} for mark in sorted(chart.marks, key=lambda mark: mark.x)],
        "x": list(shared),
        "lines": lines,
    }


def _bar_data(bars: Bars) -> dict[str, Any] | None:
    if not bars.categories or not bars.stacks:
        return None
    stacks = [
        {"name": name, "values": _rounded(values, _Y_DIGITS), "color": f"stack-{index % len(LIGHT.stacks)}"}
        for index, (name, values) in enumerate(bars.stacks)
    ]
    totals = _rounded(bars.totals, _Y_DIGITS) if bars.totals is not None else None
    return {
        **_common(bars, "bars", _BAR_KEYS),
        "categories": list(bars.categories),
        "stacks": stacks,
        "totals": totals,
    }


def _common(part: Chart | Bars, kind: str, keys: str) -> dict[str, Any]:
    about = {"key": part.key, "title": part.title, "xLabel": part.x_label, "yLabel": part.y_label}
    numbers = {"xNumbers": numbers_of(part.x_label), "yNumbers": numbers_of(part.y_label)}
    return {"kind": kind, **about, **numbers, "keys": keys}


def _rounded(values: Sequence[float], digits: int) -> list[float | None]:
    """Round values to `digits` significant digits, to keep the page small; non-finite values become None."""
    rounded = (float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values)
    return [int(value) if value is not None and value.is_integer() else value for value in rounded]


def _json(data: dict[str, Any]) -> str:
    """Encode data as ASCII JSON without "<", so that it cannot close the enclosing script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _table(table: Table) -> str:
    headings = "".join(
        f'<th scope="col" aria-sort="none"{_number_class(spec)}><button type="button">{escape(name)}</button></th>'
        for name, spec in zip(table.columns, table.formats, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, table.formats, table.columns))}</tr>\n" for row in table.rows)
    key = escape(table.key)
    return f"""<div class="table" id="{key}">
<h3 id="{key}-title">{escape(table.title)}</h3>
{_note(table.note)}<div class="scroll" tabindex="0" role="region" aria-labelledby="{key}-title">
<table class="sortable">
<thead><tr>{headings}</tr></thead>
<tbody>
{rows}</tbody>
</table>
</div>
</div>
"""


def _cell(value: Cell, spec: str, column: str) -> str:
    """Return a table cell with its sort key and its column's name, which narrow screens show instead of headings."""
    label = f' data-label="{escape(column)}"'
    text, is_number = escape(show(value, spec)), isinstance(value, float | int) and math.isfinite(value)
    if value is None or (isinstance(value, float) and not is_number):
        return f'<td{label} class="nothing{" number" if spec else ""}">{show(None, spec)}</td>'
    data = f' data-value="{value!r}"' if is_number else ""
    return f"<td{label}{data}{_number_class(spec)}>{text}</td>"


def _number_class(spec: str) -> str:
    return ' class="number"' if spec else ""


def escape(text: str) -> str:
    """Escape text for HTML; control characters and lone surrogates are removed."""
    return html.escape(one_line(text))
