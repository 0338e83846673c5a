"""Where an axis is marked, and how its numbers are written, for the images."""

from __future__ import annotations

import math

from lockstep.report.document import Chart, Scale

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_BINARY = ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"))
_MOST_TICKS = 9


def number(value: float) -> str:
    """A number of an axis: 1,234, 2.5 M, 0.05, 300 µ."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e6:
        unit, prefix = next((unit, prefix) for unit, prefix in _LARGE if size >= unit)
        return f"{value / unit:.4g} {prefix}"
    if size < 1e-3:
        unit, prefix = next(((unit, prefix) for unit, prefix in _SMALL if size >= unit * 0.9999), _SMALL[-1])
        return f"{value / unit:.4g} {prefix}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def binary_number(value: float) -> str:
    """A number of bytes: 512, 64 Ki, 1 Mi."""
    unit, prefix = next(((unit, prefix) for unit, prefix in _BINARY if abs(value) >= unit), (1, ""))
    return f"{value / unit:.4g} {prefix}".strip()


def is_bytes(label: str) -> bool:
    """Whether an axis counts bytes (and not bytes a second)."""
    return "(bytes)" in label


def measured(chart: Chart) -> list[float]:
    """The places of a log2 x axis at which something was measured, such as worker counts; none if they are many."""
    places = {x for line in chart.lines for x in line.x if math.isfinite(x) and x > 0}
    return sorted(places) if chart.x_scale == "log2" and len(places) <= _MOST_TICKS else []


def logarithmic(low: float, high: float, scale: Scale, is_bytes: bool) -> list[float]:
    """The places from `low` to `high` of a logarithmic axis that get a number.

    Powers of two are for bytes and small counts; 1,024 images a second would look like a measurement.
    """
    if scale == "log2" and (is_bytes or high < 1024):
        return powers(low, high, 2)
    if high / low >= 2000:
        return powers(low, high, 10)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for decade in decades for digit in (1, 2, 5) if low <= (value := digit * 10.0**decade) <= high]


def powers(low: float, high: float, base: int) -> list[float]:
    """The powers of `base` from `low` to `high`, every n-th of them if they are many."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [float(base) ** power for power in range(first, last + 1, step)]
