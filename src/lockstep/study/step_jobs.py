"""Measure the steps of a job in its own worker processes, which a launcher starts and stops."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lockstep.config.mapping import from_mapping, to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.diagnosis.observed_steps import RESULT_MARK
from lockstep.errors import ConfigError, StoppedError
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.worker_variables import threads
from lockstep.study.points import StepLength
from lockstep.world.devices import usable_cores

# Exit codes of a job that was stopped from outside.
ENDED = (StoppedError.exit_code, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
MODULE = "lockstep.study.step_worker"
MemoryLimit = int | Literal["free"] | None  # per worker: bytes, its share of free memory, or no limit


@dataclass(frozen=True)
class StepJobOutcome:
    """The result of a job: the launcher's exit code, and figures or the reason why there are none.

    Args:
        by_worker: The figures of every worker that has sent some, the first of which is in `figures`.
        out_of_memory: A worker's error if it ran out of memory; otherwise "".
        error: A worker's error if it failed for another reason; otherwise "".
        samples_unknown: A program should count its samples per step, and does not.
        last_message: The launcher's last message if the job failed; otherwise "".
    """

    code: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    out_of_memory: str = ""
    error: str = ""
    samples_unknown: bool = False
    last_message: str = ""
    by_worker: Sequence[Mapping[str, Any]] = ()

    @property
    def reason(self) -> str:
        """Why there are no figures."""
        return self.out_of_memory or self.error or self.last_message or f"the launcher's exit code is {self.code}"

    @property
    def was_ended(self) -> bool:
        return self.code in ENDED


def encode(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit) -> str:
    """Encode a worker's settings as one command-line argument."""
    return json.dumps({"length": asdict(length), "memory_limit": memory_limit, "config": to_mapping(config)})


def decode(argument: str) -> tuple[TrainConfig, StepLength, MemoryLimit]:
    """Decode the argument of `encode`, in the worker."""
    settings = json.loads(argument)
    config = from_mapping(TrainConfig, settings["config"], "the study's configuration")
    return config, StepLength(**settings["length"]), settings["memory_limit"]


def send_result(kind: str, content: Any) -> None:
    """Print a worker's result for the launcher; `kind` is "figures", "out_of_memory" or "error"."""
    print(RESULT_MARK + json.dumps({kind: content}), flush=True)


def measure_in_job(plan: JobPlan, jobs: JobSeries) -> StepJobOutcome:
    """Run a plan of step workers and return the result; show stderr if the job failed, unless memory ran out."""
    output, log = io.BytesIO(), io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(output)) as out, redirect_stderr(io.TextIOWrapper(log)) as errors:
        code = jobs.run(plan, OutputPlan(plan.workers, prefixed=False))
        out.flush()
        errors.flush()
        lines, rest = (stream.getvalue().decode(errors="replace") for stream in (output, log))
    results: dict[str, Any] = {}
    by_worker: list[Mapping[str, Any]] = []
    for line in lines.splitlines():
        if line.startswith(RESULT_MARK):
            result = json.loads(line.removeprefix(RESULT_MARK))
            results = {**result, **results}  # the first of each kind counts
            by_worker += [result["figures"]] if "figures" in result else []
    messages = [line.removeprefix("lockstep: ") for line in rest.splitlines() if line.startswith("lockstep: ")]
    outcome = StepJobOutcome(
        code, **results, by_worker=by_worker, last_message=messages[-1] if code and messages else ""
    )
    if code and not outcome.out_of_memory and not outcome.samples_unknown and not outcome.was_ended:
        print(rest, end="", file=sys.stderr)
    return outcome


def about_plan(plan: JobPlan) -> dict[str, Any]:
    """Return a plan's number of nodes and threads, for the record."""
    return {"nodes": len(plan.nodes), "threads": int(plan.environment["OMP_NUM_THREADS"])}


def plan_steps(
    where: LaunchOptions,
    workers: int,
    most_workers: int,
    config: TrainConfig,
    length: StepLength,
    memory_limit: MemoryLimit = None,
) -> JobPlan:
    """Plan the job that measures the steps of a configuration, as `plan_command` does.

    Args:
        memory_limit: "free" has no effect on a GPU, whose memory is already a limit.
    """
    command = (where.python_of_workers, "-m", MODULE, encode(config, length, memory_limit))
    return plan_command(where, workers, most_workers, command)


def plan_command(where: LaunchOptions, workers: int, most_workers: int, command: Sequence[str]) -> JobPlan:
    """Plan a job of a study on `workers` workers.

    Args:
        most_workers: The largest number of workers in the study. It determines the threads per worker of every job,
            because scaling is only comparable if all jobs have the same number of threads per worker.

    Raises:
        ConfigError: The options contradict each other, or are for nodes that are started manually.
    """
    cores, here = usable_cores(), names_of_this_machine()

    def plan_for(number: int) -> JobPlan:
        return plan_from(where, number, command, os.environ, cores, lambda: 1, here)

    largest = plan_for(most_workers)
    if largest.manual:
        raise ConfigError("studies cannot be combined with --nodes or --dist-url; pass the hosts with -H")
    own = os.environ.get("OMP_NUM_THREADS", "")
    each = own if own.isdecimal() else threads(cores, max(node.workers for node in largest.nodes))
    plan = plan_for(workers)
    return replace(plan, environment={**plan.environment, "OMP_NUM_THREADS": str(each)})
