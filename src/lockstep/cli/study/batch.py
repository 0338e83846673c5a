"""`lockstep study batch`: throughput and memory by batch size, and the largest batch that fits."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from lockstep.cli.json_output import print_json
from lockstep.cli.parse import parse, parse_train
from lockstep.cli.run import split
from lockstep.cli.study import TO_GO_ON, empty_table, read_job, show_number, train_command, until_interrupted
from lockstep.config.flags import arg
from lockstep.config.schema import check_workers
from lockstep.config.values import parse_size
from lockstep.errors import ConfigError, require
from lockstep.files.jsonl import read_records
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.controller.manual_job import run_study
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions
from lockstep.report.scaling_series import EQUAL_BATCHES

if TYPE_CHECKING:
    from lockstep.study.step_jobs import StepJobOutcome

FIELDS = ("batch", "fits", "why", "samples_per_second", "step_seconds", "peak_memory_bytes", "memory")  # in JSON
ENOUGH = 0.95  # fraction of the best throughput
MEMORY = {"device": "of the GPU's memory", "resident": "resident"}


@dataclass(frozen=True)
class BatchCommand:
    """Measure throughput and memory by batch size, and find the largest that fits.

    A PyTorch program or the flags of `lockstep train` follow `--`. {batch}, the batch size per worker, is replaced in
    a program's command. Recorded measurements are not repeated.

    Examples:
        lockstep study batch -- cifar10 -a resnet18
        lockstep study batch -- python train.py -b {batch}
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
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        for flag, value in (("-np", self.workers), ("--first", self.first), ("--steps", self.steps)):
            require(value >= 1, flag, value, "at least 1")
        require(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "at least 0")
        require(self.last is None or self.last >= self.first, "--last", self.last, f"at least --first {self.first}")


def main(arguments: Sequence[str]) -> int:
    own, job = split(arguments)
    command = parse(BatchCommand, "study batch", own)

    def study(where: LaunchOptions) -> int:
        with JobSeries() as jobs, tempfile.TemporaryDirectory() as scratch:
            return _study(replace(command, where=where), job, jobs, Path(scratch))

    return until_interrupted(lambda: run_study(command.where, command.workers, study))


def _study(command: BatchCommand, job: Sequence[str], jobs: JobSeries, scratch: Path) -> int:
    about, words = _command(command, job)
    from lockstep.study.points import append_record, check_record_file, next_size
    from lockstep.study.step_jobs import about_plan, measure_in_job

    plan = _plan(command, words, command.first, scratch)  # reports invalid arguments before the first measurement
    if command.where.dry_run:
        print(f"batches of {command.first}, {2 * command.first}, ... on {command.workers} workers")
        return 0
    check_record_file(command.out)
    about |= {"kind": "batch", "workers": command.workers}
    about |= {"steps": command.steps, "warmup_steps": command.warmup_steps, "memory_limit": command.memory_limit}
    about |= about_plan(plan)
    earlier = read_records(command.out) if command.out.exists() else ()
    found = {record["batch"]: record for record in earlier if all(record.get(name) == about[name] for name in about)}
    if found:
        print(f"already recorded: {', '.join(f'{size:,}' for size in sorted(found))}")
    while (size := next_size(_fits(found), command.first, command.last)) is not None:
        print(f"batch {size:,}: ", end="", flush=True)
        outcome = measure_in_job(_plan(command, words, size, scratch), jobs, command.workers)
        if outcome.was_ended:
            print(f"interrupted\n{TO_GO_ON}; recorded in {command.out}")
            return outcome.code
        found[size] = {**about, **_result(size, outcome, command.workers)}
        append_record(command.out, found[size])
        print(_describe(found[size]))
    records, verdict = [found[size] for size in sorted(found)], _verdict(found)
    _show(records)
    print(*verdict, sep="\n")
    if command.json:
        print_json({"rows": [{name: each.get(name) for name in FIELDS} for each in records], "verdict": verdict})
    print(f"recorded in {command.out}")
    return 0


def _command(command: BatchCommand, job: Sequence[str]) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the fields that identify what is measured, and its command."""
    from lockstep.study.points import about_program, is_program, measured_flags

    if is_program(job):
        if not any("{batch}" in word for word in job):
            raise ConfigError("the command needs {batch}, its batch size per worker: -- python train.py -b {batch}")
        return about_program(job), job
    config = read_job(job)
    flags = [*job, *measured_flags(config, command.warmup_steps + command.steps), "--batch-size"]
    check_workers(parse_train([*flags, str(command.first)]).job, command.workers)
    return about_program(["lockstep", "train", *job]), train_command(command.where, [*flags, "{batch}"])


def _plan(command: BatchCommand, words: Sequence[str], size: int, scratch: Path) -> JobPlan:
    from lockstep.study.points import StepPoint
    from lockstep.study.step_jobs import plan_measurement

    point = StepPoint(command.workers, size * command.workers, ("weak",), 0)
    limit = parse_size(command.memory_limit, "--memory-limit") if command.memory_limit else "free"
    length = f"{command.warmup_steps},{command.steps},1,{limit}"
    return plan_measurement(command.where, point, words, length, scratch / str(size), command.workers)


def _result(size: int, outcome: StepJobOutcome, workers: int) -> dict[str, Any]:
    """Return the fields that describe the outcome for a batch size.

    Raises:
        ConfigError: The job failed, but not from running out of memory.
    """
    from lockstep.study.step_jobs import KILLED

    samples = outcome.figures.get("samples_per_step")
    if samples is not None:
        if EQUAL_BATCHES * samples < size * workers:
            return {"batch": size, "fits": False, "why": f"too few data: its steps had {samples:,.4g} samples"}
        return {"batch": size, "fits": True, **outcome.figures}
    if outcome.out_of_memory or outcome.code == KILLED or outcome.data_too_small:
        return {"batch": size, "fits": False, "why": outcome.reason}
    if outcome.samples_unknown or outcome.figures:
        raise ConfigError("the program's samples are unknown: call lockstep.step(samples=n) after each step")
    raise ConfigError(f"batch size {size} failed, but not from running out of memory: {outcome.reason}")


def _fits(found: Mapping[int, Mapping[str, Any]]) -> dict[int, bool]:
    return {size: record["fits"] for size, record in found.items()}


def _describe(record: Mapping[str, Any]) -> str:
    if not record["fits"]:
        return f"does not fit ({record['why']})"
    rate, memory = show_number(record["samples_per_second"]), record["peak_memory_bytes"] / 1e9
    return f"{rate} samples/s, {memory:.3g} GB {MEMORY[record['memory']]}"


def _show(records: Sequence[Mapping[str, Any]]) -> None:
    table = empty_table("", ("batch per worker", "samples/s", "ms per step", "peak memory (GB)"))
    for record in records:
        if record["fits"]:
            rate, milliseconds = record["samples_per_second"], 1000 * record["step_seconds"]["median"]
            memory = f"{record['peak_memory_bytes'] / 1e9:.3g}"
            table.add_row(f"{record['batch']:,}", show_number(rate), f"{milliseconds:.3g}", memory)
        else:
            table.add_row(f"{record['batch']:,}", "-", "-", "does not fit")
    Console().print(table)


def _verdict(found: Mapping[int, Mapping[str, Any]]) -> list[str]:
    rates = {size: record["samples_per_second"] for size, record in sorted(found.items()) if record["fits"]}
    if not rates:
        return [f"batch size {min(found)} does not fit; try a smaller --first"]
    largest, best = max(rates), max(rates.values())
    enough = next(size for size, rate in rates.items() if rate >= ENOUGH * best)
    misfits = [size for size, record in found.items() if not record["fits"]]
    fits = f"the largest batch per worker that fits is {largest:,} ({min(misfits):,} does not)" if misfits else ""
    return [
        fits or f"the largest batch per worker that was tried, {largest:,}, fits",
        f"a batch of {enough:,} reaches {100 * ENOUGH:.0f} % of the best throughput ({show_number(best)} samples/s)",
    ]
