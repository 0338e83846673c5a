"""Loss scale of fp16 runs over the steps, and the skipped steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lockstep.report.document import Chart, Line, Section
from lockstep.report.read.curve import Curve, drawn, points_a_line, x_values
from lockstep.report.read.run import Run
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import STEPS


def build(material: Material) -> Section | None:
    scales = [(index, run, curve) for index, run in enumerate(material.runs) if (curve := run.steps.get("loss_scale"))]
    if not scales:
        return None
    limit = points_a_line(len(scales))
    lines = []
    for index, run, curve in scales:
        scale = curve.changes(limit)
        lines.append(Line(run.name, x_values(scale.steps), drawn(scale.values), color=index))
        skipped = _skipped(run, curve, limit)
        if skipped:
            x, y = x_values(skipped.steps), drawn(skipped.values)
            lines.append(Line(f"{run.name}, steps skipped", x, y, look="points", color=index))
    note = (
        "The factor that scales the loss so that fp16 gradients do not underflow. Points: steps were skipped since the "
        "previous record because a gradient was infinite or NaN."
    )
    chart = Chart("loss-scale", "Loss scale", STEPS.label, "loss scale", lines, y_scale="log2", note=note)
    return Section("Loss scale", "\n".join(_counts(material.runs)), [chart])


def _skipped(run: Run, scale: Curve, limit: int) -> Curve | None:
    """Return the loss scale at each record that reports newly skipped steps."""
    counts = run.steps.get("skipped_steps")
    if not counts:
        return None
    rises = [0] if counts.values[0] > 0 else []
    rises += [index for index, (before, after) in enumerate(pairwise(counts.values), start=1) if after > before]
    if not rises:
        return None
    steps = [counts.steps[index] for index in rises]
    values = [_value_at(scale, step) for step in steps]
    return Curve(steps, steps, steps, values).every(limit)


def _value_at(curve: Curve, step: float) -> float:
    later = (value for at, value in zip(curve.steps, curve.values, strict=True) if at >= step)
    return next(later, curve.values[-1])


def _counts(runs: Sequence[Run]) -> list[str]:
    skipped = [(run, counts) for run in runs if (counts := run.steps.get("skipped_steps"))]
    return [
        f"{run.name}: {counts.values[-1]:,.0f} of {counts.steps[-1]:,.0f} steps were skipped."
        for run, counts in skipped
    ]
