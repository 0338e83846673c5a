"""Charts that have one line per run, their lines and x axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lockstep.report.document import Chart, Line, Look, Scale
from lockstep.report.run import MAX_POINTS, Curve, Run

MAX_POINTS_A_CHART = 20_000  # over all its lines; a browser draws as many in half a second
FEWEST_POINTS = 200
THINNED = "Long lines are thinned: each point is the average of an interval of the run."


@dataclass(frozen=True)
class RunCurve:
    """A curve of run number `index` in the report; the index selects its color in every chart."""

    index: int
    name: str
    curve: Curve
    look: Look = "solid"


@dataclass(frozen=True)
class Axis:
    """An x axis: its label, and how to get the x values of a curve."""

    label: str
    x_of: Callable[[Curve], Sequence[float]]
    divisor: float = 1.0


LOG_NOTE = " The axis is logarithmic because the rates differ by more than a factor of 10."
EPOCHS = Axis("epoch", lambda curve: curve.epochs)
STEPS = Axis("optimizer step", lambda curve: curve.steps)


def time_axis(curves: Sequence[RunCurve]) -> Axis:
    """Return the axis of training time, in a unit that suits the longest curve."""
    seconds, unit = time_unit(max((item.curve.seconds[-1] for item in curves), default=0.0))
    return Axis(f"training time ({unit})", lambda curve: curve.seconds, seconds)


def of_runs(runs: Sequence[Run], find: Callable[[Run], Curve | None]) -> list[RunCurve]:
    """Return the runs' curves, as found by `find`, without runs for which it returns None."""
    found = ((index, run, find(run)) for index, run in enumerate(runs))
    return [RunCurve(index, run.name, curve) for index, run, curve in found if curve]


def lines(curves: Sequence[RunCurve], axis: Axis, factor: float = 1.0) -> list[Line]:
    """Return the lines of curves over an axis, thinned to suit their number; `factor` scales the values."""
    limit = points_a_line(len(curves))
    found = []
    for item in curves:
        curve = item.curve.thinned(limit)
        known = [(x, value) for x, value in zip(axis.x_of(curve), curve.values, strict=True) if math.isfinite(x)]
        x = [x / axis.divisor for x, _ in known]
        y = [value * factor if math.isfinite(value) else None for _, value in known]
        found.append(Line(item.name, x, y, look=item.look, color=item.index))
    return found


def charts(
    key: str,
    title: str,
    label: str,
    curves: Sequence[RunCurve],
    axis: Axis | None,
    about: str,
    factor: float = 1.0,
    is_rate: bool = False,
    **options: Any,
) -> list[Chart]:
    """Return a chart of curves over an axis, or none without curves.

    Args:
        label: Of the y axis.
        axis: The x axis; None: training time.
        about: The note, to which a sentence on thinning is added if any curve is thinned.
        factor: Scales the values.
        is_rate: Whether the y axis is logarithmic if `rate_scale` says so.
        options: Of `Chart`.
    """
    axis = axis or time_axis(curves)
    drawn = lines(curves, axis, factor)
    if is_rate and rate_scale(drawn) != "linear":
        about, options = about + LOG_NOTE, {**options, "y_scale": rate_scale(drawn)}
    if any(len(item.curve) >= points_a_line(len(curves)) for item in curves):
        about += f" {THINNED}"
    return [Chart(key, title, axis.label, label, drawn, note=about, **options)] if curves else []


def rate_scale(lines: Iterable[Line]) -> Scale:
    """Return "log10" if the lines' medians differ by more than a factor of 10, which a linear axis would flatten."""
    typical = [median(known) for line in lines if (known := [value for value in line.y if value and value > 0])]
    return "log10" if typical and max(typical) > 10 * min(typical) else "linear"


def points_a_line(lines: int) -> int:
    """Return the maximum number of points per line in a chart of `lines` lines."""
    return max(FEWEST_POINTS, min(MAX_POINTS, MAX_POINTS_A_CHART // max(lines, 1)))


def time_unit(longest_seconds: float) -> tuple[float, str]:
    """Return a unit that suits the longest time: its length in seconds and its name."""
    if longest_seconds < 300:
        return 1.0, "s"
    return (60.0, "min") if longest_seconds < 3 * 3600 else (3600.0, "h")
