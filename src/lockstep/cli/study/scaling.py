"""`lockstep study scaling`: throughput and time per step of a training job, by number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from lockstep.cli.parse import parse
from lockstep.cli.run import split
from lockstep.cli.study import TO_GO_ON, empty_table, parse_counts, read_job, show_number, until_interrupted
from lockstep.config.flags import arg
from lockstep.config.schema import check_workers
from lockstep.errors import require
from lockstep.launch.plan.options import LaunchOptions

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.launch.controller.job import JobSeries
    from lockstep.launch.plan.job_plan import JobPlan
    from lockstep.study.points import Mode, StepLength, StepPoint
    from lockstep.study.step_jobs import StepJobOutcome

PARTS = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "communication_exposed": "exchange",
    "optimizer": "optimizer",
    "other": "other",
}


@dataclass(frozen=True)
class ScalingCommand:
    """Measure throughput and the time of each part of a step on different numbers of workers.

    The job's `lockstep train` flags follow `--`; its batch size is that of the smallest number of workers.
    Recorded measurements are not repeated. To resume, run the same command again.

    Examples:
        lockstep study scaling -np 1,2,4 -- cifar10 -a resnet18
    """

    workers: Annotated[str, arg(name="np", aliases=["-np"], metavar="N,N,...")] = ""
    """Numbers of workers, such as 1,2,4,8."""
    mode: Literal["strong", "weak", "both"] = "both"
    """strong: constant global batch size. weak: constant batch size per worker."""
    repeats: int = 3
    """Measurements per number of workers, each in new processes."""
    steps: int = 30
    """Steps per measurement."""
    warmup_steps: int = 5
    """Warm-up steps before each measurement."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    seed: int = 0
    """Seed of the random order of measurements."""
    out: Path = Path("study/scaling.jsonl")
    """File to append the records to."""

    def __post_init__(self) -> None:
        for flag, value in (("--repeats", self.repeats), ("--steps", self.steps)):
            require(value >= 1, flag, value, "at least 1")
        require(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "at least 0")

    @property
    def length(self) -> StepLength:
        from lockstep.study.points import StepLength

        return StepLength(self.steps, self.warmup_steps)

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("strong", "weak") if self.mode == "both" else (self.mode,)


def main(arguments: Sequence[str]) -> int:
    own, job = split(arguments)
    command = parse(ScalingCommand, "study scaling", own)
    return until_interrupted(lambda: _study(command, job))


def _study(command: ScalingCommand, job: Sequence[str]) -> int:
    config = read_job(job)
    from lockstep.files.jsonl import read_records
    from lockstep.launch.controller.job import JobSeries
    from lockstep.study.figures import check_record_file
    from lockstep.study.points import job_digest, key_of, missing_points, plan_points
    from lockstep.study.step_jobs import about_plan, plan_steps

    points = plan_points(config, parse_counts("-np", command.workers), command.modes, command.repeats, command.seed)
    most = max(point.workers for point in points)
    settings = {"steps": command.steps, "warmup_steps": command.warmup_steps}
    about = {"job": job_digest(config), "flags": list(job), **settings}
    plans: dict[StepPoint, JobPlan] = {}
    for point in points:
        check_workers(point.config(config), point.workers)
        plans[point] = plan_steps(command.where, point.workers, most, point.config(config), command.length)

    def describe(point: StepPoint) -> dict[str, Any]:
        return {**about, **point.to_mapping(), **about_plan(plans[point])}

    earlier = list(read_records(command.out)) if command.out.exists() else []
    missing = missing_points(points, describe, earlier)
    for line in _introduce(points, missing, plans):
        print(line)
    if command.where.dry_run:
        return 0
    check_record_file(command.out)
    code = 0
    with JobSeries() as jobs:
        for number, point in enumerate(missing, start=1):
            print(f"[{number}/{len(missing)}] {_name(point)}: ", end="", flush=True)
            outcome = _measure(plans[point], jobs, describe(point), command.out)
            if outcome.was_ended:
                print(f"{TO_GO_ON}; recorded in {command.out}")
                return outcome.code
            code = outcome.code or code
    keys = {key_of(describe(point)) for point in points}
    _show([record for record in read_records(command.out) if key_of(record) in keys and "failed" not in record])
    print(f"recorded in {command.out}")
    return code


def _introduce(
    points: Sequence[StepPoint], missing: Sequence[StepPoint], plans: Mapping[StepPoint, JobPlan]
) -> list[str]:
    """Return a description of the measurements and their workers, as lines to print."""
    lines = [f"{len(points)} measurements, {len(points) - len(missing)} of them already recorded"]
    for point in sorted(points, key=lambda point: (point.workers, point.global_batch)):
        if point.repeat == 0:
            plan = plans[point]
            hosts = "" if plan.is_local else f" ({', '.join(f'{node.workers} on {node.host}' for node in plan.nodes)})"
            lines.append(f"  {_name(point)}{hosts}: {' and '.join(point.modes)}")
    lines.append(f"threads per worker: {plans[points[0]].environment['OMP_NUM_THREADS']}")
    return [*lines, *dict.fromkeys(note for plan in plans.values() for note in plan.notes if "warning" in note)]


def _name(point: StepPoint) -> str:
    workers = "1 worker" if point.workers == 1 else f"{point.workers} workers"
    return f"{workers}, global batch {point.global_batch:,}"


def _measure(plan: JobPlan, jobs: JobSeries, about: Mapping[str, Any], out: Path) -> StepJobOutcome:
    """Measure a point and append its record."""
    from lockstep.study.step_jobs import append_record, measure_in_job

    outcome = measure_in_job(plan, jobs)
    if outcome.was_ended:
        print("interrupted")
        return outcome
    failed = {} if outcome.figures else {"failed": outcome.reason}
    append_record(out, "scaling", {**about, **failed, **outcome.figures})
    if failed:
        print(f"failed: {outcome.reason}")
    else:
        step = outcome.figures["step_seconds"]["median"]
        print(f"{show_number(outcome.figures['images_per_second'])} images/s, {1000 * step:.3g} ms per step")
    return outcome


def _show(records: Iterable[Mapping[str, Any]]) -> None:
    """Print the medians over the repeats, by series and number of workers."""
    from rich.console import Console

    console = Console()
    for mode in ("strong", "weak"):
        series: dict[int, list[Mapping[str, Any]]] = {}
        for record in records:
            if mode in record["modes"]:
                series.setdefault(record["workers"], []).append(record)
        if len(series) > 1 or (series and mode == "strong"):
            ordered = dict(sorted(series.items()))
            console.print(_throughput(mode, ordered), _split(ordered), sep="\n")


def _throughput(mode: str, series: Mapping[int, Sequence[Mapping[str, Any]]]) -> Table:
    table = empty_table(f"{mode} scaling", ("workers", "images/s", "lowest to highest", "speed-up", "efficiency"))
    first: tuple[int, float] | None = None
    for workers, repeats in series.items():
        rates = [record["images_per_second"] for record in repeats]
        rate = median(rates)
        base, base_rate = first = first or (workers, rate)
        spread = f"{show_number(min(rates))} to {show_number(max(rates))}"
        speed_up = rate / base_rate
        table.add_row(
            str(workers), show_number(rate), spread, f"{speed_up:.2f}", f"{100 * speed_up * base / workers:.0f} %"
        )
    return table


def _split(series: Mapping[int, Sequence[Mapping[str, Any]]]) -> Table:
    table = empty_table("milliseconds per step", ("workers", *PARTS.values()))
    for workers, repeats in series.items():
        parts = [median(1000 * record["split_seconds"][part] for record in repeats) for part in PARTS]
        table.add_row(str(workers), *(f"{part:.3g}" for part in parts))
    return table
