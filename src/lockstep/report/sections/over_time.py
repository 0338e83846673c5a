"""Curves over the runs: accuracy and loss, learning rate, throughput, waiting for data, the loss scale and I/O."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from lockstep.errors import plural
from lockstep.files.io_records import job_io
from lockstep.report.document import Chart, Look, Section
from lockstep.report.run import Curve, Run
from lockstep.report.run_lines import EPOCHS, STEPS, Axis, RunCurve, charts, of_runs, time_unit

TIME_NOTE = "Time is training time over all sessions."


_FIGURES = (  # key, title, label, factor, note
    ("top1", "Top-1 accuracy", "top-1 (%)", 100, "Share of images whose class the network ranks first."),
    ("top5", "Top-5 accuracy", "top-5 (%)", 100, "Share of images whose class is among the first five."),
    ("loss", "Loss", "loss", 1, "Average over an epoch's samples."),
)
_CHANGED_LABELS = " A training loss with changed labels (in parentheses) is not comparable with other losses."
_MIN_RATE = 1e-3  # smallest learning rate on a logarithmic axis, as a share of a run's highest


def build_learning(runs: Sequence[Run]) -> Section | None:
    parts = [chart for figure in _FIGURES for chart in _charts(runs, *figure)]
    rates, about = of_runs(runs, lambda run: run.steps.get("lr")), "The optimizer's learning rate at each record."
    drawn = charts("learning-rate", "Learning rate", "learning rate", rates, EPOCHS, about, is_rate=True)
    parts += [chart if chart.y_scale == "linear" else _without_low_rates(chart) for chart in drawn]
    text = "Dotted lines: validation. Solid lines: training, measured while the weights change."
    return Section("Learning curves", text, parts) if parts else None


def _without_low_rates(chart: Chart) -> Chart:
    note = f"{chart.note} Rates below {_MIN_RATE:g} of a run's highest are left out."
    return replace(chart, lines=[replace(line, y=_without_ends(line.y)) for line in chart.lines], note=note)


def _without_ends(rates: Sequence[float | None]) -> list[float | None]:
    """Drop rates, such as those at the end of a cosine, that would stretch a logarithmic axis over many decades."""
    least = _MIN_RATE * max((rate for rate in rates if rate is not None), default=0.0)
    return [rate if rate is not None and rate >= least else None for rate in rates]


def _charts(runs: Sequence[Run], key: str, title: str, label: str, factor: float, about: str) -> list[Chart]:
    curves = _both_splits(runs, key)
    if key == "loss" and any(run.label_changes for run in runs):
        about += _CHANGED_LABELS
    return [
        chart
        for axis, name, more in ((EPOCHS, "epochs", ""), (None, "time", f" {TIME_NOTE}"))
        for chart in charts(f"{key}-{name}", f"{title} against {name}", label, curves, axis, about + more, factor)
    ]


def _both_splits(runs: Sequence[Run], key: str) -> list[RunCurve]:
    """Return training and validation curves; names of training losses tell how the labels were changed."""
    curves = []
    for index, run in enumerate(runs):
        changes = f" ({run.label_changes})" if key == "loss" and run.label_changes else ""
        if training := run.curve(key, "train"):
            curves.append(RunCurve(index, f"{run.name}, training{changes}", training))
        if validation := run.curve(key, "val"):
            curves.append(RunCurve(index, f"{run.name}, validation", validation, "dotted"))
    return curves


def build_throughput(runs: Sequence[Run]) -> Section | None:
    rates = of_runs(runs, lambda run: run.curve_of_steps("images_per_second"))
    waits = of_runs(runs, lambda run: run.curve_of_steps("data_wait"))
    epochs = of_runs(runs, lambda run: run.epochs.get(("epoch_seconds", "train")))
    title, label = "Throughput over time", "throughput (samples/s)"
    about = "Training samples per second, summed over all workers, at each record."
    parts = charts("throughput", title, label, rates, None, about, is_rate=True, from_zero=True)
    about = "Share of time that the first worker spent waiting for its next batch."
    parts += charts("data-wait", "Waiting for data", "share of time (%)", waits, None, about, 100, from_zero=True)
    about = "Training time of each epoch, without evaluations."
    parts += charts("epoch-time", "Time per epoch", "time (s)", epochs, EPOCHS, about, from_zero=True)
    return Section("Throughput", parts=parts) if parts else None


def build_loss_scale(runs: Sequence[Run]) -> Section | None:
    scales = of_runs(runs, lambda run: run.steps.get("loss_scale"))
    about = "The factor that scales the loss so that fp16 gradients do not underflow."
    parts = charts("loss-scale", "Loss scale", "loss scale", scales, STEPS, about, y_scale="log2")
    return Section("Loss scale", "\n".join(_skipped(runs)), parts) if parts else None


def _skipped(runs: Sequence[Run]) -> list[str]:
    skipped = [(run, counts) for run in runs if (counts := run.steps.get("skipped_steps"))]
    return [
        f"{run.name}: {max(filter(math.isfinite, counts.values)):,.0f} of {counts.steps[-1]:,.0f} steps were skipped."
        for run, counts in skipped
    ]


Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class _StorageChart:
    """A chart of several amounts, each with a legend label and a line style."""

    key: str
    title: str
    amounts: Sequence[tuple[str, str, Look]]
    note: str
    label: str = "bandwidth (MB/s)"
    factor: float = 1e-6


_IO_FIGURES = (
    _StorageChart(
        "io-read",
        "Bytes read",
        (("storage_read_bytes", "from storage", "solid"), ("read_bytes", "read calls", "dotted")),
        "From storage: bytes that disks delivered; network file systems may not be counted. Read calls also count "
        "bytes from the page cache, pipes and sockets.",
    ),
    _StorageChart(
        "io-written",
        "Bytes written",
        (("storage_written_bytes", "to storage", "solid"), ("written_bytes", "write calls", "dotted")),
        "To storage: checkpoints, records and logs; network file systems may not be counted. Write calls also count "
        "bytes to pipes and sockets, such as gradients that Gloo sends to other workers.",
    ),
    _StorageChart(
        "io-operations",
        "I/O operations",
        (("read_operations", "reads", "solid"), ("write_operations", "writes", "dotted")),
        "Read and write system calls of the workers and all their child processes, on files, pipes and sockets.",
        "operations per second",
        1,
    ),
    _StorageChart(
        "io-disks",
        "The nodes' disks",
        (("node_disk_read_bytes", "read", "solid"), ("node_disk_written_bytes", "written", "dotted")),
        "All devices of the job's nodes, used by any process.",
    ),
    _StorageChart(
        "io-network",
        "The nodes' network",
        (("node_network_received_bytes", "received", "solid"), ("node_network_sent_bytes", "sent", "dotted")),
        "All interfaces except loopback; native InfiniBand traffic is not included.",
    ),
)


def build_storage(runs: Sequence[Run]) -> tuple[Section | None, list[str]]:
    """Return the section, and warnings about skipped records."""
    damaged: Counter[Path] = Counter()
    found: list[tuple[int, str, Rows]] = []
    warnings = []
    for index, run in enumerate(runs):
        try:
            found.append((index, run.name, job_io(run.path, on_damage=lambda path: damaged.update([path]))))
        except OSError as error:
            warnings.append(f"cannot read the I/O records of {run.path}: {error.strerror or error}")
    longest = max((rows[-1]["unix_time"] - rows[0]["unix_time"] for _, _, rows in found if rows), default=0.0)
    parts = [chart for figure in _IO_FIGURES for chart in _io_charts(figure, found, longest)]
    warnings += [f"{path}: skipped {plural(count, 'damaged line')}" for path, count in damaged.items()]
    text = "Sums over all workers, or over all nodes, against wall-clock time."
    return Section("Storage and network", text, parts) if parts else None, warnings


def _io_charts(figure: _StorageChart, found: Sequence[tuple[int, str, Rows]], longest: float) -> list[Chart]:
    curves = [
        RunCurve(index, f"{name}, {label}", curve, look)
        for index, name, rows in found
        for amount, label, look in figure.amounts
        if (curve := _io_curve(rows, f"{amount}_per_second"))
    ]
    seconds, unit = time_unit(longest)
    axis = Axis(f"time since the first record ({unit})", lambda curve: curve.seconds, seconds)
    title = f"{figure.title} over time"
    return charts(figure.key, title, figure.label, curves, axis, figure.note, figure.factor, from_zero=True)


def _io_curve(rows: Rows, name: str) -> Curve | None:
    """Return a rate over time, with gaps between sessions; None if all its values are zero."""
    known = [(row["unix_time"] - rows[0]["unix_time"], row["seconds"], row.get(name, 0.0)) for row in rows]
    if not any(rate for _, _, rate in known):
        return None
    width = min((later - start for (start, _, _), (later, _, _) in pairwise(known)), default=0.0)
    seconds, values = [known[0][0]], [known[0][2]]
    for (start, _, _), (later, _, rate) in pairwise(known):
        if later - start > 1.5 * width:
            seconds.append(start + width)
            values.append(math.nan)
        seconds.append(later)
        values.append(rate)
    return Curve(seconds, seconds, seconds, values)
