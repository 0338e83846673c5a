"""Measuring the steps of a job in workers of its own, which a launcher starts and ends."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lockstep.config.mapping import from_mapping, to_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, StoppedError
from lockstep.files.jsonl import RecordWriter
from lockstep.launch.controller.job import JobSeries
from lockstep.launch.output.display import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan, threads
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.study.points import StepLength
from lockstep.world.world import usable_cores

# The exit codes of a job that somebody has ended, not itself.
ENDED = (StoppedError.exit_code, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
MARK = "lockstep-steps "  # begins the line in which a worker tells what came of it
MODULE = "lockstep.study.step_worker"
MemoryLimit = int | Literal["free"] | None  # of a worker: bytes, its share of what is free, or none


@dataclass(frozen=True)
class StepJobOutcome:
    """What came of a job: the launcher's exit code, and figures, or why there are none.

    Args:
        out_of_memory: A worker's words where its memory did not suffice; "" else.
        error: A worker's words where it failed otherwise; "" else.
        said: The launcher's last words on a failure.
    """

    code: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    out_of_memory: str = ""
    error: str = ""
    said: str = ""

    @property
    def reason(self) -> str:
        """Why there are no figures."""
        return self.out_of_memory or self.error or self.said or f"the launcher's exit code is {self.code}"

    @property
    def was_ended(self) -> bool:
        return self.code in ENDED


def encode(config: TrainConfig, length: StepLength, memory_limit: MemoryLimit) -> str:
    """What a worker needs to be told, as one word of its command line."""
    return json.dumps({"length": asdict(length), "memory_limit": memory_limit, "config": to_mapping(config)})


def decode(word: str) -> tuple[TrainConfig, StepLength, MemoryLimit]:
    """The same, in the worker."""
    told = json.loads(word)
    config = from_mapping(TrainConfig, told["config"], "the study's configuration")
    return config, StepLength(**told["length"]), told["memory_limit"]


def tell(kind: str, content: Any) -> None:
    """From a worker: "figures", "out_of_memory" or "error"."""
    print(MARK + json.dumps({kind: content}), flush=True)


def measure_in_job(plan: JobPlan, jobs: JobSeries) -> StepJobOutcome:
    """Carry out a plan whose command is the step worker's; what is written besides is shown if nobody says why."""
    told, said = io.BytesIO(), io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(told)) as out, redirect_stderr(io.TextIOWrapper(said)) as errors:
        code = jobs.run(plan, OutputPlan(plan.workers, prefixed=False))
        out.flush()
        errors.flush()
        lines, rest = (stream.getvalue().decode(errors="replace") for stream in (told, said))
    words: dict[str, Any] = {}
    for line in lines.splitlines():
        if line.startswith(MARK):
            words = {**json.loads(line.removeprefix(MARK)), **words}  # of several, the first word counts
    said_last = [line.removeprefix("lockstep: ") for line in rest.splitlines() if line.startswith("lockstep: ")]
    outcome = StepJobOutcome(code, **words, said=said_last[-1] if code and said_last else "")
    if code and not outcome.out_of_memory and not outcome.was_ended:
        print(rest, end="", file=sys.stderr)
    return outcome


def append_record(path: Path, kind: str, record: Mapping[str, Any]) -> None:
    """Append what came of a job, with the time that an epoch's training takes at its rate."""
    epoch = {}
    if "images_per_second" in record:
        epoch["epoch_seconds"] = record["samples"] / record["images_per_second"]
    writer = RecordWriter(path)
    writer.write({"kind": kind, **record, **epoch, "unix_time": time.time()})
    writer.close()


def about_plan(plan: JobPlan) -> dict[str, Any]:
    """What a record says of where its job ran."""
    return {"nodes": len(plan.nodes), "threads": int(plan.environment["OMP_NUM_THREADS"])}


def plan_steps(
    where: LaunchOptions,
    workers: int,
    most_workers: int,
    config: TrainConfig,
    length: StepLength,
    memory_limit: MemoryLimit = None,
) -> JobPlan:
    """The job that measures the steps of a configuration, on so many workers.

    Args:
        most_workers: Of the study. Each worker has the threads that it would have among so many, since the threads of a
            worker would else grow fewer as workers grow more, and scaling would be that of threads.
        memory_limit: A GPU's own memory is a limit already, so "free" adds none there.

    Raises:
        ConfigError: The options contradict each other, or are of nodes that are started by hand.
    """
    command = (where.python or sys.executable, "-m", MODULE, encode(config, length, memory_limit))
    cores, here = usable_cores(), names_of_this_machine()

    def plan_for(number: int) -> JobPlan:
        return plan_from(where, number, command, os.environ, cores, lambda: 1, here)

    largest = plan_for(most_workers)
    if largest.by_hand:
        raise ConfigError("a study starts its own jobs; name the hosts by -H, not by --nodes or --dist-url")
    own = os.environ.get("OMP_NUM_THREADS", "")
    each = own if own.isdecimal() else threads(cores, max(node.workers for node in largest.nodes))
    plan = plan_for(workers)
    return replace(plan, environment={**plan.environment, "OMP_NUM_THREADS": str(each)})
