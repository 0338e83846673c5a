"""Lines of charts that have one line a run, and their x axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from lockstep.report.document import Line, Scale
from lockstep.report.read.curve import THINNED, Curve, drawn, places, points_a_line, time_unit
from lockstep.report.read.run import Run

Look = Literal["solid", "dashed", "dotted", "points"]


@dataclass(frozen=True)
class RunCurve:
    """A curve of run number `index` in the report, by which it has its colour in every chart."""

    index: int
    name: str
    curve: Curve
    look: Look = "solid"


@dataclass(frozen=True)
class Axis:
    """What curves are drawn against: an axis label, and where its numbers come from."""

    key: str
    label: str
    place: Callable[[Curve], Sequence[float]]
    divisor: float = 1.0


SCALE_NOTES = {
    "linear": "",
    "log2": "",
    "log10": " The axis is logarithmic, as the rates differ by more than ten times.",
}
EPOCHS = Axis("epochs", "epoch", lambda curve: curve.epochs)
STEPS = Axis("steps", "optimizer step", lambda curve: curve.steps)


def time_axis(curves: Sequence[RunCurve]) -> Axis:
    """Time of training in the unit that suits the longest curve."""
    seconds, unit = time_unit(max((item.curve.seconds[-1] for item in curves), default=0.0))
    return Axis("time", f"time of training ({unit})", lambda curve: curve.seconds, seconds)


def of_runs(
    runs: Sequence[Run], find: Callable[[Run], Curve | None], suffix: str = "", look: Look = "solid"
) -> list[RunCurve]:
    """The curves that the runs have."""
    found = ((index, run, find(run)) for index, run in enumerate(runs))
    return [RunCurve(index, run.name + suffix, curve, look) for index, run, curve in found if curve]


def lines(curves: Sequence[RunCurve], axis: Axis, factor: float = 1.0) -> list[Line]:
    """Draw curves against an axis, thinned to what a chart of so many lines can hold; `factor` changes the unit."""
    limit = points_a_line(len(curves))
    return [_line(item, item.curve.thinned(limit), axis, factor) for item in curves]


def ideal_line(name: str, x: Sequence[float], y: Sequence[float], color: int | None) -> Line:
    """What a series would be if workers added up; `color` is the series', or None where it is the only one."""
    return Line(f"ideal, {name}", x, y, look="dotted", color=color, is_ideal=True)


def _line(item: RunCurve, curve: Curve, axis: Axis, factor: float) -> Line:
    placed = zip(axis.place(curve), curve.values, strict=True)
    known = [(place, value) for place, value in placed if math.isfinite(place)]
    x, y = places([place for place, _ in known], axis.divisor), drawn([value for _, value in known], factor)
    return Line(item.name, x, y, look=item.look, color=item.index)


def rate_scale(lines: Iterable[Line]) -> Scale:
    """Logarithmic where the lines' typical values differ by more than ten times, so that none lies on the axis."""
    typical = [median(known) for line in lines if (known := [value for value in line.y if value and value > 0])]
    return "log10" if typical and max(typical) > 10 * min(typical) else "linear"


def note(text: str, curves: Sequence[RunCurve]) -> str:
    """What a chart's note says, and that lines are thinned if any is."""
    limit = points_a_line(len(curves))
    return f"{text} {THINNED}" if any(len(item.curve) >= limit for item in curves) else text
