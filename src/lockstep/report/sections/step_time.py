"""Where each worker's time goes: its phases, and the named stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.diagnosis.explanation import ranks_text
from lockstep.diagnosis.phases import RECORDED, names
from lockstep.files.jsonl import number
from lockstep.report.document import Bars, Cell, Section, Table, filled_table
from lockstep.report.measured_step import MeasuredStep
from lockstep.report.run import Run

_MAX_RUNS = 4  # with figures
_MAX_BARS = 32
_STRAGGLERS = (
    ("run", ""),
    ("step", ",.0f"),
    ("ranks", ""),
    ("host", ".0f"),
    ("phase", ""),
    ("time per step (ms)", ",.2f"),
    ("median of the others (ms)", ",.2f"),
)


def build_worker_phases(runs: Sequence[Run]) -> Section | None:
    measured = [(run, run.measured) for run in runs if run.measured and run.measured.workers > 1]
    parts: list[Bars | Table] = [
        _split(step, f"worker-phases-{index}", f": {run.name}" if len(runs) > 1 else "")
        for index, (run, step) in enumerate(_newest(measured), start=1)
    ]
    rows = _stragglers(runs)
    if rows:
        about = "Ranks that were slower than the others in three consecutive records."
        if any(straggler.host for run in runs for straggler in run.stragglers):
            about += " Hosts are numbered in order of appearance; their names are in metrics.jsonl."
        parts.append(filled_table("stragglers", "Stragglers", _STRAGGLERS, rows, about))
    return Section("Time of each worker", _text(len(measured)), parts) if parts else None


def _text(runs: int) -> str:
    lines = [
        "Times of each worker are averages over all epochs; of observed programs, medians over the last records. The "
        "slowest worker waits least for the others. Waiting for other workers includes the transfer of gradients that "
        "does not overlap with backward.",
    ]
    if runs > _MAX_RUNS:
        lines.append(f"Only the {_MAX_RUNS} newest runs have figures.")
    return "\n".join(lines if runs else [])


def _newest(measured: Sequence[tuple[Run, MeasuredStep]]) -> list[tuple[Run, MeasuredStep]]:
    """Return those of the `_MAX_RUNS` runs with the newest sessions, in the order of the runs."""
    starts = [number(run.start, "unix_time") or 0.0 for run, _ in measured]
    newest = sorted(range(len(measured)), key=lambda index: -starts[index])[:_MAX_RUNS]
    return [measured[index] for index in sorted(newest)]


def _split(step: MeasuredStep, key: str, suffix: str) -> Bars:
    """Return stacked bars, one per rank; of more than `_MAX_BARS` ranks, those with the most time of their own."""
    own = step.own
    ranks = sorted(sorted(range(step.workers), key=lambda rank: -own[rank])[:_MAX_BARS])
    times = {phase: step.by_rank(phase) for phase in RECORDED}
    return Bars(
        key,
        f"Time per step of each worker{suffix}",
        "rank",
        "time per step (ms)",
        [str(rank) for rank in ranks],
        [(_label(phase), [1e3 * seconds[rank] for rank in ranks]) for phase, seconds in times.items() if any(seconds)],
        note=f"The slowest {_MAX_BARS} of {step.workers:,} workers." if step.workers > _MAX_BARS else "",
    )


def _label(phase: str) -> str:
    return names(phase).report


def _stragglers(runs: Sequence[Run]) -> list[list[Cell]]:
    hosts: dict[str, int] = {}
    return [
        [
            run.name if len(runs) > 1 else None,
            straggler.step,
            ranks_text(straggler.ranks).partition(" ")[2],
            hosts.setdefault(straggler.host, len(hosts) + 1) if straggler.host else None,
            _label(straggler.phase),
            1e3 * straggler.seconds,
            1e3 * straggler.others_seconds,
        ]
        for run in runs
        for straggler in run.stragglers
    ]
