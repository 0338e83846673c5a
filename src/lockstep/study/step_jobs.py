"""Measure the steps of a command in its own worker processes, which a launcher starts and stops.

The workers' side is `lockstep.world.measurement`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lockstep.diagnosis import MEASURE, MEASURE_SPAWNED
from lockstep.diagnosis.observed_steps import RESULT_MARK, transfer_seconds
from lockstep.diagnosis.phases import RECORDED, parts_of
from lockstep.diagnosis.stragglers import rounded
from lockstep.errors import LOST_PEER, ConfigError, StoppedError, plural
from lockstep.launch.controller.job_series import JobSeries, collect
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.worker_variables import threads
from lockstep.study.points import StepPoint, fill_in
from lockstep.world.devices import usable_cores
from lockstep.world.machine import describe_commits

# Exit codes of a job that was stopped from outside.
ENDED = (StoppedError.exit_code, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
KILLED = 128 + signal.SIGKILL  # exit code after Linux killed a worker because memory ran out
# The last line of a traceback, of a worker's error file or in its output, and of the C++ library's message.
FAILURE = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\w*(?::.*)?|terminate called.*")
# In errors of torch, oneDNN, cuDNN, NumPy, Python and the C++ library for a lack of memory.
NO_MEMORY = (
    *("allocate memory", "out of memory", "bad_alloc", "could not create a memory", "Unable to allocate"),
    *("MemoryError", "could not create a primitive", "unable to find an engine"),
)


@dataclass(frozen=True)
class StepJobOutcome:
    """The result of a job: the launcher's exit code, and figures or the reason why there are none.

    Args:
        out_of_memory: A worker's error if it ran out of memory; otherwise "".
        error: Any other reason for a lack of figures; "" with figures.
        data_too_small: No step could be measured, because each is a pass over the data.
        samples_unknown: The program should count its samples per step, and does not.
        exchanges_unknown: Whether the workers exchange gradients cannot be seen.
    """

    code: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    out_of_memory: str = ""
    error: str = ""
    data_too_small: bool = False
    samples_unknown: bool = False
    exchanges_unknown: bool = False

    @property
    def reason(self) -> str:
        """Why there are no figures."""
        return self.out_of_memory or self.error

    @property
    def was_ended(self) -> bool:
        return self.code in ENDED


def measure_in_job(plan: JobPlan, jobs: JobSeries, workers: int) -> StepJobOutcome:
    """Run a plan whose variables ask for a measurement, and join what its workers have measured.

    If the job failed, but not from running out of memory, what it wrote to stderr is shown.
    """
    code, results, rest = collect(jobs, plan, RESULT_MARK)
    outcome = outcome_of(code, results, rest.splitlines(), workers, plan.command)
    if code and not (outcome.out_of_memory or outcome.samples_unknown or outcome.was_ended):
        print(rest, end="", file=sys.stderr)
    return outcome


def outcome_of(
    code: int, results: Sequence[Mapping[str, Any]], log: Sequence[str], workers: int, command: Sequence[str] = ()
) -> StepJobOutcome:
    """Return the outcome of a job from the results that its workers sent, and from its stderr."""
    sent = {kind: content for result in reversed(results) for kind, content in result.items()}  # the first of each kind
    by_worker = [result["figures"] for result in results if "figures" in result]
    try:
        figures = figures_of(by_worker, workers, command)
    except ValueError as error:
        reason = str(error)
    else:
        unknown = workers > 1 and any(each["exchanges"] is None for each in by_worker)
        return StepJobOutcome(code, figures, exchanges_unknown=unknown)
    failures = [line for line in log if code and FAILURE.fullmatch(line)]
    no_memory = [line for line in failures if any(text in line for text in NO_MEMORY)]
    return StepJobOutcome(
        code,
        out_of_memory=sent.get("out_of_memory") or next(iter(no_memory), ""),
        error=_describe_failure(code, failures, log) or sent.get("error") or reason,
        data_too_small="data_too_small" in sent,
        samples_unknown="samples_unknown" in sent,
    )


def _describe_failure(code: int, failures: Sequence[str], log: Sequence[str]) -> str:
    """Return the launcher's last message, and the last error that is not of a lost connection; "" without a failure."""
    messages = [line.removeprefix("lockstep: ") for line in log if code and line.startswith("lockstep: ")]
    causes = [line for line in failures if not any(text in line for text in LOST_PEER)]
    return "; ".join([*messages[-1:], *causes[-1:]]) or (f"the launcher's exit code is {code}" if code else "")


def figures_of(by_worker: Sequence[Mapping[str, Any]], workers: int, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record's fields from what all workers have measured.

    Raises:
        ValueError: Workers sent nothing, or one of several trained alone; the message says so.
    """
    if len(by_worker) < workers:
        sent = f"{len(by_worker)} of {plural(workers, 'worker')} measured any steps"
        raise ValueError(f"{sent}; a step is a call of a torch optimizer's step(), or of lockstep.step()")
    if workers > 1 and not all(figures["connected"] for figures in by_worker):
        raise ValueError("the workers are independent programs: they created no process group")
    steps_made = min(figures["measured_steps"] for figures in by_worker)
    if workers > 1 and any(figures["exchanges"] == 0 for figures in by_worker):
        rare = "(if it averages less often, measure more --steps)"
        raise ValueError(f"no gradients were exchanged in {plural(steps_made, 'step')}: is the model wrapped? {rare}")
    rates = [figures["samples_per_second"] for figures in by_worker]
    rate = {}
    if None not in rates:  # reports take the first rate
        batches = [figures["samples_per_second"] / figures["steps_per_second"] for figures in by_worker]
        rate = {"samples_per_second": sum(rates), "samples_per_step": sum(batches)}
    parts = [parts_of(figures["phase_seconds"]) for figures in by_worker]
    columns = {phase: [each["phase_seconds"].get(phase, 0.0) for each in by_worker] for phase in RECORDED}
    shares = [figures["utilization"] for figures in by_worker]
    limits = [figures["memory_limit_bytes"] for figures in by_worker if figures["memory_limit_bytes"]]
    gpus = dict.fromkeys(sorted(figures["gpu"] for figures in by_worker if figures["gpu"]))
    return {
        **rate,
        "steps_per_second": median(figures["steps_per_second"] for figures in by_worker),
        "step_seconds": {
            part: fmean(figures["step_seconds"][part] for figures in by_worker) for part in ("low", "median", "high")
        },
        "split_seconds": {name: fmean(seconds[name] for seconds in parts) for name in parts[0]},
        "phase_seconds": {phase: rounded(column) for phase, column in columns.items() if any(column)},
        "transfer_seconds": transfer_seconds(each["waits"] for each in by_worker) if workers > 1 else None,
        "program": by_worker[0]["program"],
        "measured_steps": steps_made,
        "backward_passes_per_step": fmean(figures["backward_passes_per_step"] for figures in by_worker),
        "peak_memory_bytes": max(figures["peak_memory_bytes"] for figures in by_worker),
        "memory": by_worker[0]["memory"],
        **({"memory_limit_bytes": min(limits)} if limits else {}),
        **_power(by_worker),
        **({} if None in shares else {"utilization": fmean(shares)}),
        "device": by_worker[0]["device"],
        **({"gpu": ", ".join(gpus)} if gpus else {}),
        **_environment(by_worker, command),
    }


def _power(by_worker: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the power of the hosts and GPUs by kind, each counter once, and what is not counted."""
    read = [counter for figures in by_worker for counter in figures.get("counter_watts", ())]
    sums = Counter[str]()
    for kind, watts in {(host, name): (kind, watts) for host, name, kind, watts in read}.values():
        sums[kind] += watts
    unread = sorted({line for figures in by_worker for line in figures.get("energy_unread", ())})
    return ({"watts": dict(sums)} if sums else {}) | ({"energy_unread": unread} if unread else {})


def _environment(by_worker: Sequence[Mapping[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """Return the first worker's machine and the commits, and the usable cores."""
    machine = next((figures["environment"] for figures in by_worker if figures["environment"]), None)
    if machine is None:
        return {}
    return {"cores": machine["cores"], "environment": {**machine, **describe_commits(command)}}


def about_plan(plan: JobPlan) -> dict[str, Any]:
    """Return a plan's number of nodes and threads, for the record."""
    return {"nodes": len(plan.nodes), "threads": int(plan.environment["OMP_NUM_THREADS"])}


def plan_measurement(
    where: LaunchOptions,
    point: StepPoint,
    command: Sequence[str],
    length: str,
    run: Path,
    most_workers: int,
    own_workers: bool = False,
) -> JobPlan:
    """Plan the job that measures a command at a point of a study.

    Args:
        length: The value of the variable MEASURE.
        run: The folder that {run} in the command stands for.
        most_workers: The largest number of workers in the study. It determines the threads per worker of every job,
            because scaling is only comparable if all jobs have the same number of threads per worker.
        own_workers: The command starts its workers itself.

    Raises:
        ConfigError: The options contradict each other, or the command is not found.
    """
    cores, here = usable_cores(), names_of_this_machine()

    def plan_for(number: int) -> JobPlan:
        return plan_from(where, number, command, os.environ, cores, lambda: 1, here)

    largest = plan_for(most_workers)
    if largest.manual:
        raise ConfigError("the --dry-run of a study cannot be combined with --nodes or --dist-url; use -H")
    own = os.environ.get("OMP_NUM_THREADS", "")
    each = own if own.isdecimal() else threads(cores, max(node.workers for node in largest.nodes))
    plan = plan_for(1 if own_workers else point.workers)
    variables = {"OMP_NUM_THREADS": str(each), MEASURE_SPAWNED if own_workers else MEASURE: length}
    words = fill_in(command, point, len(plan.nodes), run)
    plan = replace(plan, command=words, environment={**plan.environment, **variables})
    plan.check_program()
    return plan
