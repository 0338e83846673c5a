"""Run a job whose workers' steps are observed, for `lockstep run` and `horovodrun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.run_paths import is_training
from lockstep.diagnosis import NOT_OBSERVED, OBSERVE, REPORT
from lockstep.diagnosis.observed_steps import PHASES, ObservedSteps
from lockstep.diagnosis.phases import names
from lockstep.files.metric_records import JOULES_PER_KWH
from lockstep.files.output import say
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.observe.job_steps import JobSteps

MUCH = 0.1  # of the time per sample, which an unasked advice must promise
MIN_RECORDS = 10  # one a second
Run = Callable[[Mapping[str, str], JobSteps | None], int]


def run_observed(
    command: Sequence[str], run: Run, folder: Path | None = None, observes: bool = True, end: JobEnd | None = None
) -> int:
    """Run a job, and print its workers' steps at the end if they are recorded; return its exit code.

    Args:
        command: The workers' command. `lockstep train` observes itself.
        run: Runs the job, given additional variables of its workers, and what receives their steps.
        folder: For records; None: the folder that LOCKSTEP_OBSERVE names, if any.
        end: Receives what was observed.

    Raises:
        ConfigError: The folder has files, or cannot be made.
    """
    value = os.environ.get(OBSERVE, "1")
    observes = observes and value != "0"
    if folder is None and observes and value not in (*NOT_OBSERVED, "1"):
        folder = Path(value)
    if not observes or is_training(command):
        return run({OBSERVE: "", **({} if observes else {REPORT: "0"})}, None)
    steps, code = JobSteps(command, folder), None
    steps.where = {"folder": os.getcwd()}
    try:
        code = run({OBSERVE: str(folder.absolute()) if folder else "1"}, steps)
    finally:
        steps.close(code)
    if folder:
        _show(steps.by_rank(), code)
        if joules := steps.joules.total():
            missing = f" (not counted: {'; '.join(steps.not_counted)})" if steps.not_counted else ""
            say(f"energy: {joules / JOULES_PER_KWH:.4g} kWh{missing}", sys.stdout)
    try:
        lines = [] if code else advice(steps.kept)
    except Exception as error:  # it must not change the job's exit code
        lines = [f"what bounds the steps is unknown: {error!r}"]
    for line in lines:
        say(f"lockstep: {line}")
    if end:
        end.stragglers, end.findings, end.verdict = steps.stragglers, steps.findings, lines
    return code


def advice(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what bounds a job's steps if a change is expected to gain much; otherwise nothing."""
    if len(records) < MIN_RECORDS:
        return []
    from lockstep.report.read_steps import measured_in
    from lockstep.report.step_verdict import explain
    from lockstep.report.worker_records import RunRecords

    read = RunRecords()
    read.take_all(records)
    measured = measured_in(read)
    verdict = explain(measured) if measured and measured.records >= MIN_RECORDS else None
    return verdict.lines if verdict and any(change.gain >= MUCH for change in verdict.changes) else []


def _show(steps: Mapping[int, ObservedSteps], code: int) -> None:
    from rich.console import Console
    from rich.table import Table

    if not steps and not code:
        fix = "lockstep.train.fit has records of its own; other programs can call lockstep.step() after each"
        say(f"no steps of an optimizer of torch were seen; {fix} (docs/howto/when-scaling-disappoints.md)", sys.stdout)
    if not steps:
        return
    phases = [phase for phase in PHASES if any(phase in each.per_step for each in steps.values())]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("rank", "steps", "samples", "steps/s", *(names(phase).watch for phase in phases)):
        table.add_column(heading, justify="right")
    for rank, each in steps.items():
        times = (f"{1000 * each.per_step.get(phase, 0.0):.3g}" for phase in phases)
        samples = "unknown" if each.samples is None else f"{each.samples:,}"
        table.add_row(str(rank), f"{each.steps:,}", samples, f"{each.steps_per_second:.4g}", *times)
    Console().print("observed steps, and their mean ms by phase", table, sep="\n")
