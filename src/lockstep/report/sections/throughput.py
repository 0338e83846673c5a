"""Throughput of the runs over time, and the share of time spent waiting for data."""

from __future__ import annotations

from lockstep.report.document import Chart, Section
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import SCALE_NOTES, lines, note, of_runs, rate_scale, time_axis


def build(material: Material) -> Section | None:
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
