"""`lockstep study batch`: throughput and memory by batch size, and the largest batch that fits."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from lockstep.cli.parse import parse
from lockstep.cli.run import split
from lockstep.cli.study import TO_GO_ON, empty_table, read_job, show_number, until_interrupted
from lockstep.config.flags import arg
from lockstep.config.schema import TrainConfig, check_workers
from lockstep.config.values import parse_size
from lockstep.errors import ConfigError, require
from lockstep.files.jsonl import read_records
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions

if TYPE_CHECKING:
    from lockstep.study.step_jobs import StepJobOutcome

KILLED = 128 + signal.SIGKILL  # exit code after Linux killed a worker because memory ran out
ENOUGH = 0.95  # fraction of the best throughput
MEMORY = {"device": "of the GPU's memory", "resident": "resident"}


@dataclass(frozen=True)
class BatchCommand:
    """Measure throughput and memory by batch size, and find the largest that fits.

    The job's `lockstep train` flags follow `--`. Recorded measurements are not repeated.

    Examples:
        lockstep study batch -- cifar10 -a resnet18
    """

    workers: Annotated[int, arg(name="np", aliases=["-np"], metavar="N")] = 1
    """Number of workers."""
    first: int = 16
    """Smallest batch size per worker."""
    last: int | None = None
    """Largest batch size per worker. Default: what fits."""
    memory_limit: Annotated[str | None, arg(metavar="SIZE")] = None
    """Memory per worker, such as 8GB. Default: the GPU's, or a share of free memory."""
    steps: int = 10
    """Steps per measurement."""
    warmup_steps: int = 3
    """Warm-up steps before each measurement."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    out: Path = Path("study/batch.jsonl")
    """File to append the records to."""

    def __post_init__(self) -> None:
        for flag, value in (("-np", self.workers), ("--first", self.first), ("--steps", self.steps)):
            require(value >= 1, flag, value, "at least 1")
        require(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "at least 0")
        require(self.last is None or self.last >= self.first, "--last", self.last, f"at least --first {self.first}")


def main(arguments: Sequence[str]) -> int:
    own, job = split(arguments)
    command = parse(BatchCommand, "study batch", own)

    def study() -> int:
        with JobSeries() as jobs:
            return _study(command, job, jobs)

    return until_interrupted(study)


def _study(command: BatchCommand, job: Sequence[str], jobs: JobSeries) -> int:
    config = read_job(job)
    from lockstep.study.figures import append_record, check_record_file
    from lockstep.study.points import job_digest, next_size
    from lockstep.study.step_jobs import about_plan, measure_in_job

    plan = _plan(command, config, command.first)  # reports invalid arguments before the first measurement
    if command.where.dry_run:
        print(f"batches of {command.first}, {2 * command.first}, ... on {command.workers} workers")
        return 0
    check_record_file(command.out)
    about = {"kind": "batch", "job": job_digest(config), "flags": list(job), "workers": command.workers}
    about |= {"steps": command.steps, "warmup_steps": command.warmup_steps, "memory_limit": command.memory_limit}
    about |= about_plan(plan)
    earlier = read_records(command.out) if command.out.exists() else ()
    found = {record["batch"]: record for record in earlier if all(record.get(name) == about[name] for name in about)}
    if found:
        print(f"already recorded: {', '.join(f'{size:,}' for size in sorted(found))}")
    while (size := next_size(_fits(found), command.first, _most(found, command))) is not None:
        print(f"batch {size:,}: ", end="", flush=True)
        outcome = measure_in_job(_plan(command, config, size), jobs)
        if outcome.was_ended:
            print(f"interrupted\n{TO_GO_ON}; recorded in {command.out}")
            return outcome.code
        found[size] = {**about, **_result(size, outcome)}
        append_record(command.out, found[size])
        print(_describe(found[size]))
    _show([found[size] for size in sorted(found)])
    for line in _verdict(found, command):
        print(line)
    print(f"recorded in {command.out}")
    return 0


def _plan(command: BatchCommand, config: TrainConfig, size: int) -> JobPlan:
    from lockstep.study.points import StepLength, keeping_nothing
    from lockstep.study.step_jobs import plan_steps

    config = keeping_nothing(replace(config, batch_size=size, global_batch_size=None))
    check_workers(config, command.workers)
    length = StepLength(command.steps, command.warmup_steps)
    limit = parse_size(command.memory_limit, "--memory-limit") if command.memory_limit else None
    return plan_steps(command.where, command.workers, command.workers, config, length, limit or "free")


def _result(size: int, outcome: StepJobOutcome) -> dict[str, Any]:
    """Return the fields that describe the outcome for a batch size.

    Raises:
        ConfigError: The job failed, but not from running out of memory.
    """
    if outcome.figures:
        return {"batch": size, "fits": True, **outcome.figures}
    if outcome.out_of_memory or outcome.code == KILLED:
        return {"batch": size, "fits": False, "why": outcome.reason}
    raise ConfigError(f"batch size {size} failed, but not from running out of memory: {outcome.reason}")


def _fits(found: Mapping[int, Mapping[str, Any]]) -> dict[int, bool]:
    return {size: record["fits"] for size, record in found.items()}


def _most(found: Mapping[int, Mapping[str, Any]], command: BatchCommand) -> int | None:
    """Return the largest size to try, since a step cannot have more images than the training set; None if unknown."""
    if command.last is not None:
        return command.last
    samples = next((record["samples"] for record in found.values() if record["fits"]), None)
    return max(1, samples // command.workers) if samples else None


def _describe(record: Mapping[str, Any]) -> str:
    if not record["fits"]:
        return f"does not fit ({record['why']})"
    rate, memory = show_number(record["images_per_second"]), record["peak_memory_bytes"] / 1e9
    return f"{rate} images/s, {memory:.3g} GB {MEMORY[record['memory']]}"


def _show(records: Sequence[Mapping[str, Any]]) -> None:
    table = empty_table("", ("batch per worker", "images/s", "ms per step", "peak memory (GB)"))
    for record in records:
        if record["fits"]:
            rate, milliseconds = record["images_per_second"], 1000 * record["step_seconds"]["median"]
            memory = f"{record['peak_memory_bytes'] / 1e9:.3g}"
            table.add_row(f"{record['batch']:,}", show_number(rate), f"{milliseconds:.3g}", memory)
        else:
            table.add_row(f"{record['batch']:,}", "-", "-", "does not fit")
    Console().print(table)


def _verdict(found: Mapping[int, Mapping[str, Any]], command: BatchCommand) -> list[str]:
    rates = {size: record["images_per_second"] for size, record in sorted(found.items()) if record["fits"]}
    if not rates:
        return [f"batch size {min(found)} does not fit; try a smaller --first"]
    largest, best = max(rates), max(rates.values())
    enough = next(size for size, rate in rates.items() if rate >= ENOUGH * best)
    misfits = [size for size, record in found.items() if not record["fits"]]
    fits = f"the largest batch per worker that fits is {largest:,} ({min(misfits):,} does not)" if misfits else ""
    return [
        fits or f"the largest batch per worker that was tried, {largest:,}, fits",
        f"a batch of {enough:,} reaches {100 * ENOUGH:.0f} % of the best throughput ({show_number(best)} images/s)",
    ]
