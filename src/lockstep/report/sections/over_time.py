"""Curves over the runs: accuracy and loss, learning rate, throughput, waiting for data and the loss scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lockstep.report.document import Chart, Line, Section
from lockstep.report.read.curve import Curve, drawn, points_a_line, x_values
from lockstep.report.read.run import Run
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import EPOCHS, SCALE_NOTES, STEPS, RunCurve, lines, note, of_runs, rate_scale, time_axis

TIME_NOTE = "Time is training time over all sessions or, for TensorBoard files, wall-clock time."


@dataclass(frozen=True)
class _LearningChart:
    """A metric against epochs and time. If `labels` is set: the training loss of runs with those `label_changes`."""

    key: str
    title: str
    label: str
    factor: float
    note: str
    labels: str = ""


_FIGURES = (
    _LearningChart("top1", "Top-1 accuracy", "top-1 (%)", 100, "Share of images whose class the network ranks first."),
    _LearningChart("top5", "Top-5 accuracy", "top-5 (%)", 100, "Share of images whose class is among the first five."),
    _LearningChart("loss", "Loss", "loss", 1, "Average over an epoch's images."),
)
_MIN_RATE = 1e-3  # smallest learning rate on a logarithmic axis, as a share of a run's highest


def build_learning(material: Material) -> Section | None:
    """Return the section on accuracy, loss and learning rate, against epochs and against time."""
    parts = [chart for figure in _figures(material.runs) for chart in _charts(material.runs, figure)]
    rates = of_runs(material.runs, lambda run: run.steps.get("lr"))
    if rates:
        parts.append(_rate_chart(rates))
    if not parts:
        return None
    text = "Dotted lines: validation. Solid lines: training, measured while the weights change."
    return Section("Learning curves", text, parts)


def _figures(runs: Sequence[Run]) -> list[_LearningChart]:
    """Return the charts for all runs, and one training-loss chart for each kind of modified labels."""
    changed = dict.fromkeys(run.label_changes for run in runs if run.label_changes)
    losses = [
        _LearningChart(
            f"training-loss-{number}",
            f"Training loss with {changes}",
            "loss",
            1,
            f"Average over an epoch's images. Computed with {changes}, so it is not comparable with other losses.",
            labels=changes,
        )
        for number, changes in enumerate(changed, start=1)
    ]
    if not losses:
        return [*_FIGURES]
    top1, top5, loss = _FIGURES
    about = f"{loss.note} Training losses with modified labels are in separate charts."
    return [top1, top5, replace(loss, note=about), *losses]


def _rate_chart(rates: Sequence[RunCurve]) -> Chart:
    found = lines(rates, EPOCHS)
    scale, about = rate_scale(found), "The optimizer's learning rate at each record."
    if scale != "linear":
        found = [replace(line, y=_without_ends(line.y)) for line in found]
        about += f"{SCALE_NOTES[scale]} Rates below {_MIN_RATE:g} of a run's highest are left out."
    return Chart(
        "learning-rate", "Learning rate", EPOCHS.label, "learning rate", found, y_scale=scale, note=note(about, rates)
    )


def _without_ends(rates: Sequence[float | None]) -> list[float | None]:
    """Drop rates, such as those at the end of a cosine, that would stretch a logarithmic axis over many decades."""
    least = _MIN_RATE * max((rate for rate in rates if rate is not None), default=0.0)
    return [rate if rate is not None and rate >= least else None for rate in rates]


def _charts(runs: Sequence[Run], figure: _LearningChart) -> list[Chart]:
    curves = _training_losses(runs, figure.labels) if figure.labels else _both_splits(runs, figure.key)
    if not curves:
        return []
    charts = []
    for axis in (EPOCHS, time_axis(curves)):
        about = figure.note if axis is EPOCHS else f"{figure.note} {TIME_NOTE}"
        charts.append(
            Chart(
                f"{figure.key}-{axis.key}",
                f"{figure.title} against {'epochs' if axis is EPOCHS else 'time'}",
                axis.label,
                figure.label,
                lines(curves, axis, figure.factor),
                note=note(about, curves),
            )
        )
    return charts


def _training_losses(runs: Sequence[Run], labels: str) -> list[RunCurve]:
    return of_runs(runs, lambda run: run.curve("loss", "train") if run.label_changes == labels else None, ", training")


def _both_splits(runs: Sequence[Run], key: str) -> list[RunCurve]:
    """Return training and validation curves; training losses only of runs with unmodified labels, as in validation."""

    def of_training(run: Run) -> Curve | None:
        return None if key == "loss" and run.label_changes else run.curve(key, "train")

    training = of_runs(runs, of_training, ", training")
    validation = of_runs(runs, lambda run: run.curve(key, "val"), ", validation", "dotted")
    return sorted([*training, *validation], key=lambda item: item.index)


def build_throughput(material: Material) -> Section | None:
    """Return the section on the runs' throughput, and the share of time spent waiting for data."""
    rates = of_runs(material.runs, lambda run: run.curve_of_steps("images_per_second"))
    waits = of_runs(material.runs, lambda run: run.curve_of_steps("data_wait"))
    parts = []
    if rates:
        axis = time_axis(rates)
        found = lines(rates, axis)
        scale = rate_scale(found)
        about = note(f"Training images per second, summed over all workers, at each record.{SCALE_NOTES[scale]}", rates)
        title, label = "Throughput over time", "throughput (images/s)"
        parts.append(Chart("throughput", title, axis.label, label, found, y_scale=scale, note=about, from_zero=True))
    if waits:
        axis = time_axis(waits)
        about = note("Share of time that the first worker spent waiting for its next batch.", waits)
        title, label = "Waiting for data", "share of time (%)"
        parts.append(Chart("data-wait", title, axis.label, label, lines(waits, axis, 100), note=about, from_zero=True))
    return Section("Throughput", parts=parts) if parts else None


def build_loss_scale(material: Material) -> Section | None:
    """Return the section on the loss scale of fp16 runs, and the skipped steps."""
    scales = [(index, run, curve) for index, run in enumerate(material.runs) if (curve := run.steps.get("loss_scale"))]
    if not scales:
        return None
    limit = points_a_line(len(scales))
    drawn_lines = []
    for index, run, curve in scales:
        scale = curve.changes(limit)
        drawn_lines.append(Line(run.name, x_values(scale.steps), drawn(scale.values), color=index))
        skipped = _skipped(run, curve, limit)
        if skipped:
            x, y = x_values(skipped.steps), drawn(skipped.values)
            drawn_lines.append(Line(f"{run.name}, steps skipped", x, y, look="points", color=index))
    about = (
        "The factor that scales the loss so that fp16 gradients do not underflow. Points: steps were skipped since the "
        "previous record because a gradient was infinite or NaN."
    )
    chart = Chart("loss-scale", "Loss scale", STEPS.label, "loss scale", drawn_lines, y_scale="log2", note=about)
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
