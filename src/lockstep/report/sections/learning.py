"""Learning curves: accuracy, loss and learning rate, against epochs and against time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.report.document import Chart, Scale, Section
from lockstep.report.read.run import Run
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import EPOCHS, RunCurve, lines, note, of_runs, time_axis

TIME_NOTE = "Time is that of training alone, over all sessions; of TensorBoard files it is the time on the clock."


@dataclass(frozen=True)
class _LearningChart:
    key: str
    title: str
    label: str
    factor: float
    note: str
    scale: Scale = "linear"


_FIGURES = (
    _LearningChart("top1", "Top-1 accuracy", "top-1 (%)", 100, "Share of images whose class the network ranks first."),
    _LearningChart("top5", "Top-5 accuracy", "top-5 (%)", 100, "Share of images whose class is among the first five."),
    _LearningChart(
        "loss", "Loss", "loss", 1, "Average over an epoch's images; that of training includes label smoothing."
    ),
)


def build(material: Material) -> Section | None:
    parts = [chart for figure in _FIGURES for chart in _charts(material.runs, figure)]
    rates = of_runs(material.runs, lambda run: run.steps.get("lr"))
    if rates:
        about = note("As the optimizer had it at each record.", rates)
        parts.append(
            Chart("learning-rate", "Learning rate", EPOCHS.label, "learning rate", lines(rates, EPOCHS), note=about)
        )
    if not parts:
        return None
    text = "Dotted lines are validation, solid ones training; training's figures are taken while the weights change."
    return Section("Learning curves", text, parts)


def _charts(runs: Sequence[Run], figure: _LearningChart) -> list[Chart]:
    curves = _both_splits(runs, figure.key)
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


def _both_splits(runs: Sequence[Run], key: str) -> list[RunCurve]:
    training = of_runs(runs, lambda run: run.curve(key, "train"), ", training")
    validation = of_runs(runs, lambda run: run.curve(key, "val"), ", validation", "dotted")
    return sorted([*training, *validation], key=lambda item: item.index)
