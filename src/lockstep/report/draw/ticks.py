"""Tick positions and number formats of axes, for images and intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lockstep.report.document import Chart, Scale, ValueRanges

Numbers = Literal["plain", "bytes", "seconds"]
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_SMALL = ((1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_BINARY = ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki"))
_MOST_TICKS = 9
_FEW_TICKS = 3
_ROOM = 0.08  # width of a tick label, as a share of the axis


def numbers_of(label: str) -> Numbers:
    """Return the number format for an axis with this label."""
    return "bytes" if "(bytes)" in label else "seconds" if "(s)" in label else "plain"


def number(value: float, numbers: Numbers = "plain") -> str:
    """Format a tick label: 1,234, 2.5 M, 0.05 or 2e-5; for bytes, 64 Ki; for seconds, 300 µ."""
    size = abs(value)
    if numbers == "bytes":
        return _prefixed(value, _BINARY)
    if size >= 1e6:
        return _prefixed(value, _LARGE)
    if numbers == "seconds" and 0 < size < 0.9999e-3:
        return _prefixed(value, _SMALL)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}".replace("e-0", "e-")


def _prefixed(value: float, prefixes: Sequence[tuple[float, str]]) -> str:
    # Rounding can make a tick at 1e-6 into 9.9999e-7.
    fallback = (1, "") if prefixes[-1][0] > 1 else prefixes[-1]
    unit, prefix = next((pair for pair in prefixes if abs(value) >= pair[0] * 0.9999), fallback)
    return f"{value / unit:.4g} {prefix}".rstrip()


def measured(chart: Chart) -> list[float]:
    """Return the measured x values of a log2 axis, such as worker counts, as ticks; empty if there are too many.

    If labels would overlap, only the first one is kept.
    """
    ticks = sorted({x for line in chart.lines for x in line.x if math.isfinite(x) and x > 0})
    if chart.x_scale != "log2" or len(ticks) > _MOST_TICKS:
        return []
    room = (ticks[-1] / ticks[0]) ** _ROOM if ticks else 1.0
    apart: list[float] = []
    for tick in ticks:
        if not apart or tick >= apart[-1] * room:
            apart.append(tick)
    return apart


def logarithmic(low: float, high: float, scale: Scale, numbers: Numbers) -> list[float]:
    """Return the labeled ticks of a logarithmic axis from `low` to `high`.

    Powers of two are used only for bytes and small counts: a tick at 1,024 images/s would look like a measurement.
    """
    if scale == "log2" and (numbers == "bytes" or high < 1024):
        ticks = powers(low, high, 2)
    elif high / low >= 2000:
        ticks = powers(low, high, 10)
    else:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [value for decade in decades for digit in (1, 2, 5) if low <= (value := digit * 10.0**decade) <= high]
    return ticks if len(ticks) >= _FEW_TICKS else _round(low, high)


def _round(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= (high - low) / 5 * 0.999)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def powers(low: float, high: float, base: int) -> list[float]:
    """Return the powers of `base` from `low` to `high`; only every n-th one if there are more than 9."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
    return [float(base) ** power for power in range(first, last + 1, step)]


def of_intervals(part: ValueRanges) -> list[float]:
    """Return round tick values for the axis of `part`."""
    low, high = part.ends
    if part.is_wide:
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
        return [tick for tick in ticks if low * 0.8 <= tick <= high * 1.25]
    apart = 10 ** math.floor(math.log10((high - low) or 1.0))
    apart *= next(step for step in (0.2, 0.5, 1, 2) if (high - low) <= 6 * step * apart or step == 2)
    first = math.ceil(low / apart - 0.5)
    return [round(tick * apart, 12) for tick in range(first, math.floor(high / apart + 0.5) + 1)]
