"""I/O of the runs over time: bandwidth and operations of the job, and traffic of the nodes' disks and networks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lockstep.errors import plural
from lockstep.files.io_records import job_io
from lockstep.report.document import Chart, Section
from lockstep.report.read.curve import Curve, time_unit
from lockstep.report.read.sources import Material
from lockstep.report.run_lines import Axis, Look, RunCurve, lines, note

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class _StorageChart:
    """A chart of several amounts, each with a legend label and a line style."""

    key: str
    title: str
    label: str
    factor: float
    amounts: Sequence[tuple[str, str, Look]]
    note: str


_FIGURES = (
    _StorageChart(
        "io-read",
        "Bytes read",
        "bandwidth (MB/s)",
        1e-6,
        (("storage_read_bytes", "from storage", "solid"), ("read_bytes", "read calls", "dotted")),
        "From storage: bytes that disks delivered; network file systems may not be counted. Read calls also count "
        "bytes from the page cache, pipes and sockets.",
    ),
    _StorageChart(
        "io-written",
        "Bytes written",
        "bandwidth (MB/s)",
        1e-6,
        (("storage_written_bytes", "to storage", "solid"), ("written_bytes", "write calls", "dotted")),
        "To storage: checkpoints, records and logs; network file systems may not be counted. Write calls also count "
        "bytes to pipes and sockets, such as gradients that Gloo sends to other workers.",
    ),
    _StorageChart(
        "io-operations",
        "I/O operations",
        "operations per second",
        1,
        (("read_operations", "reads", "solid"), ("write_operations", "writes", "dotted")),
        "Read and write system calls of the workers and all their child processes, on files, pipes and sockets.",
    ),
    _StorageChart(
        "io-disks",
        "The nodes' disks",
        "bandwidth (MB/s)",
        1e-6,
        (("node_disk_read_bytes", "read", "solid"), ("node_disk_written_bytes", "written", "dotted")),
        "All devices of the job's nodes, used by any process.",
    ),
    _StorageChart(
        "io-lustre",
        "Lustre",
        "bandwidth (MB/s)",
        1e-6,
        (("node_lustre_read_bytes", "read", "solid"), ("node_lustre_written_bytes", "written", "dotted")),
        "All Lustre traffic of the job's nodes, by any process.",
    ),
    _StorageChart(
        "io-network",
        "The nodes' network",
        "bandwidth (MB/s)",
        1e-6,
        (("node_network_received_bytes", "received", "solid"), ("node_network_sent_bytes", "sent", "dotted")),
        "All interfaces except loopback; native InfiniBand traffic is not included.",
    ),
)


def build(material: Material) -> tuple[Section | None, list[str]]:
    """Return the section, and warnings about skipped records."""
    damaged: Counter[Path] = Counter()
    found: list[tuple[int, str, Rows]] = []
    warnings = []
    for index, run in enumerate(material.runs):
        try:
            found.append((index, run.name, job_io(run.path, on_damage=lambda path: damaged.update([path]))))
        except OSError as error:
            warnings.append(f"cannot read the I/O records of {run.path}: {error.strerror or error}")
    longest = max((rows[-1]["unix_time"] - rows[0]["unix_time"] for _, _, rows in found if rows), default=0.0)
    charts = [chart for figure in _FIGURES if (chart := _chart(figure, found, longest))]
    warnings += [f"{path}: skipped {plural(count, 'damaged line')}" for path, count in damaged.items()]
    text = "Sums over all workers, or over all nodes, against wall-clock time."
    return Section("Storage and network", text, charts) if charts else None, warnings


def _chart(figure: _StorageChart, found: Sequence[tuple[int, str, Rows]], longest: float) -> Chart | None:
    curves = [
        RunCurve(index, f"{name}, {label}", curve, look)
        for index, name, rows in found
        for amount, label, look in figure.amounts
        if (curve := _curve(rows, f"{amount}_per_second"))
    ]
    if not curves:
        return None
    seconds, unit = time_unit(longest)
    axis = Axis("time", f"time since the first record ({unit})", lambda curve: curve.seconds, seconds)
    drawn = lines(curves, axis, figure.factor)
    title = f"{figure.title} over time"
    return Chart(figure.key, title, axis.label, figure.label, drawn, note=note(figure.note, curves), from_zero=True)


def _curve(rows: Rows, name: str) -> Curve | None:
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
