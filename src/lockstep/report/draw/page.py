"""Render the report as one self-contained HTML page: it needs no server, network or other file.

Scripts, styles and data are inline. A content security policy allows only these scripts and styles, by their hashes,
and forbids all requests. Everything from records is escaped here, and the scripts insert it as text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any

from lockstep.files.jsonl import one_line
from lockstep.report.document import Bars, Cell, Chart, Document, Section, Table, show
from lockstep.report.draw import vega
from lockstep.report.draw.vega import DARK, LIGHT, Palette

_SCRIPTS = ("parts.js", "charts.js", "tables.js", "start.js")
DENSE_FROM = 10  # columns
_FITTED = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}, "padding": 0}
_FONT = "system-ui, sans-serif"
_PALETTE = Palette(  # the style sheet has the colors of both themes
    lines=[f"var(--line-{number})" for number in range(len(LIGHT.lines))],
    stacks=[f"var(--stack-{number})" for number in range(len(LIGHT.stacks))],
    **{name: f"var(--{name})" for name in ("text", "muted", "page", "grid")},
)
_BRUSH = {
    "name": "brush",
    "select": {"type": "interval", "encodings": ["x"], "clear": "window:pointerup", "mark": {"fill": "var(--muted)"}},
    "views": [vega.LINES],
}
_HELP = (
    "Charts: drag to zoom in, double-click to zoom out, and hover over a curve to read its values. Keyboard: arrow "
    "keys pan, + and − zoom, 0 shows the whole range. Click a name in a legend to hide its line."
)
_CURVE_KEYS = "Arrow keys pan, + and − zoom, 0 shows the whole range. The values are in the table below."
_POINT_KEYS = "Arrow keys select {}. The values are in the table below."


def render(document: Document) -> str:
    parts = document.parts
    is_wide = any(not isinstance(part, Table) and part.is_small for part in parts)
    style = f"{_color_style()}\n{_static('page.css')}"
    scripts = [vega_scripts(), *map(_static, _SCRIPTS)]
    head = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, style)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(document.title)}</title>
<style>{style}</style>
</head>
"""
    body = f"""<body{' class="wide"' if is_wide else ""}>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(document.title)}</h1>
<p class="made">{escape(document.made)}</p>
</header>
{_contents(document)}
<main id="content">
{_warnings(document.warnings)}
{f'<p class="note help">{_HELP}</p>' if any(_can_zoom(part) for part in parts) else ""}
<noscript><p>The charts need JavaScript. PNG and SVG images of them are in the figures folder.</p></noscript>
{"".join(_section(section, number) for number, section in enumerate(document.sections, 1))}
</main>
{"".join(f"<script>{script}</script>" for script in scripts)}
</body>
</html>
"""
    return head + body


@functools.cache
def vega_scripts() -> str:
    """Return vega-embed with Vega and Vega-Lite, 0.9 MB, as a script that sets `vegaEmbed`."""
    import vl_convert

    return f"(() => {{\n{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}\n}})();"


def _static(name: str) -> str:
    return (files("lockstep.report") / "static" / name).read_text(encoding="utf-8")


def _policy(scripts: Sequence[str], style: str) -> str:
    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _color_style() -> str:
    def rule(palette: Palette) -> str:
        named = {
            **{name: getattr(palette, name) for name in ("text", "muted", "page", "grid")},
            **{f"line-{number}": color for number, color in enumerate(palette.lines)},
            **{f"stack-{number}": color for number, color in enumerate(palette.stacks)},
        }
        return f":root {{ {' '.join(f'--{name}: {color};' for name, color in named.items())} }}"

    return f"{rule(LIGHT)}\n@media screen and (prefers-color-scheme: dark) {{ {rule(DARK)} }}"


def _contents(document: Document) -> str:
    if len(document.sections) < 3:
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


def _section(section: Section, number: int) -> str:
    text = "".join(f"<p>{escape(line)}</p>\n" for line in section.text.split("\n") if line.strip())
    parts = ""
    for is_grid, group in groupby(section.parts, lambda part: not isinstance(part, Table) and part.is_small):
        shown = "".join(_table(part) if isinstance(part, Table) else _figure(part) for part in group)
        parts += f'<div class="grid">\n{shown}</div>\n' if is_grid else shown
    return f'<section>\n<h2 id="section-{number}">{escape(section.title)}</h2>\n{text}{parts}</section>\n'


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>\n' if note else ""


def _figure(part: Chart | Bars) -> str:
    """Return the figure element of a chart with its data; a script draws it."""
    drawing = vega.draw(part, _PALETTE)
    heading = f"<h3>{escape(part.title)}</h3>\n{_note(part.note)}"
    if drawing is None:
        return f'<figure id="{escape(part.key)}">\n{heading}<p>No data.</p>\n</figure>\n'
    return f"""<figure id="{escape(part.key)}" data-chart>
{heading}<div class="host"></div>
<details><summary>Values</summary></details>
<script type="application/json">{_json(_data(part, drawing))}</script>
</figure>
"""


def _data(part: Chart | Bars, drawing: vega.Drawing) -> dict[str, Any]:
    """Return what the scripts need to draw a chart."""
    height, can_zoom = 230 if part.is_small else 340, _can_zoom(part)
    spec = {**drawing.spec, "height": height, **_FITTED, "config": vega.config(_PALETTE, _FONT)}
    if can_zoom:
        spec["params"] = [*drawing.spec["params"], _BRUSH]
    return {
        "key": part.key,
        "title": part.title,
        "xLabel": part.x_label,
        "yLabel": part.y_label,
        "isShare": isinstance(part, Chart) and "(%)" in part.y_label,
        "categories": list(part.categories) if isinstance(part, Bars) else None,
        "stacks": len(part.stacks) if isinstance(part, Bars) else 0,
        "canZoom": can_zoom,
        "keys": _CURVE_KEYS if can_zoom else _POINT_KEYS.format("a point" if isinstance(part, Chart) else "a bar"),
        "series": [series._asdict() for series in drawing.series],
        "spec": spec,
    }


def _can_zoom(part: Chart | Bars | Table) -> bool:
    return isinstance(part, Chart) and not part.is_small


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
    kind = "table dense" if len(table.columns) > DENSE_FROM else "table"
    return f"""<div class="{kind}" id="{key}">
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
