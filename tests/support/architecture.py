"""Draw docs/figures/architecture.svg from the imports: `python tests/support/architecture.py`.

A box is a package or a group of modules; an arrow means that a module in the upper box imports one in the lower box.
An arrow that follows from two others is left out.
"""

from __future__ import annotations

from pathlib import Path

from layers import LAYERS, imports, modules, part

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "architecture.svg"
WIDTH, BAND, GAP, BOX, MARGIN = 560, 40, 44, 118, 34
INK, LINE = "#1f2937", "#808a99"
FILLS = ("#e5e7eb", "#fde9d0", "#d9ead3", "#cfe2f3", "#dcecec", "#e4daf0", "#f6d5dc")

Edge = tuple[str, str]


def edges() -> set[Edge]:
    """Return which packages import which, across layers above the lowest, without arrows that follow from others."""
    above = {name for name, layer in LAYERS.items() if layer >= 1}
    direct: dict[str, set[str]] = {name: set() for name in above}
    for module, path in modules().items():
        if (own := part(module)) in above:
            direct[own] |= {part(name) for name in imports(path)} & above - {own}

    def reached(name: str) -> set[str]:
        return direct[name].union(*(reached(other) for other in direct[name]))

    return {
        (name, other)
        for name, others in direct.items()
        for other in others
        if int(LAYERS[name]) > int(LAYERS[other]) and not any(other in reached(between) for between in others - {other})
    }


def draw() -> str:
    """Return the figure as SVG."""
    places = _places()
    height = 7 * BAND + 6 * GAP + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Lockstep's packages by layer, and which imports which</title>",
        f'<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker>',
    ]
    for upper, lower in sorted(edges()):
        (x1, y1, _), (x2, y2, _) = places[upper], places[lower]
        parts.append(
            f'<path d="M{x1} {y1 + BAND}L{x2} {y2 - 2}" stroke="{LINE}" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for name, (x, y, width) in sorted(places.items()):
        parts.append(_box(name, x, y, width, FILLS[int(LAYERS[name])]))
    parts += [
        f'<text x="14" y="{_top(layer) + 26}" fill="{LINE}" text-anchor="middle">{layer}</text>' for layer in range(7)
    ]
    parts.append(_foundation())
    return "\n".join([*parts, "</svg>"]) + "\n"


def _top(layer: int) -> int:
    return (6 - layer) * (BAND + GAP) + 2


def _places() -> dict[str, tuple[int, int, int]]:
    """Return the center, upper edge and width of each package's box; the lowest layer is one box."""
    places = {}
    for layer in range(1, 7):
        names = [name for name in ORDER if int(LAYERS[name]) == layer]
        room = (WIDTH - MARGIN) // len(names)
        for index, name in enumerate(names):
            places[name] = (MARGIN + room * index + room // 2, _top(layer), min(BOX, room - 8))
    return places


# Ordered from left to right so that few arrows cross.
ORDER = ["cli", "lightning", "study", "report", "train", "run"]
ORDER += ["launch", "hvd", "data", "models", "world", "seeding"]


def _box(label: str, x: int, y: int, width: int, fill: str) -> str:
    return (
        f'<rect x="{x - width // 2}" y="{y}" width="{width}" height="{BAND}" rx="6" fill="{fill}"/>'
        f'<text x="{x}" y="{y + 25}" fill="{INK}" text-anchor="middle">{label}</text>'
    )


def _foundation() -> str:
    names = sorted(name for name, layer in LAYERS.items() if layer < 1)
    lines = [" · ".join(names[start : start + 6]) for start in range(0, len(names), 6)]
    top, height = _top(0), 24 + 17 * len(lines)
    middle = (WIDTH + MARGIN) // 2
    text = "".join(
        f'<text x="{middle}" y="{top + 24 + 17 * row}" fill="{INK}" text-anchor="middle" font-size="11.5">{line}</text>'
        for row, line in enumerate(lines)
    )
    return (
        f'<rect x="{MARGIN}" y="{top}" width="{WIDTH - MARGIN - 4}" height="{height}" rx="6" fill="{FILLS[0]}"/>{text}'
    )


if __name__ == "__main__":
    FIGURE.write_text(draw())
