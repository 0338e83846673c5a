"""`lockstep study scaling`: throughput and time per step of a training job or any program, by number of workers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from lockstep.cli.json_output import print_json
from lockstep.cli.parse import parse, parse_train
from lockstep.cli.run import split
from lockstep.cli.study import (
    TO_GO_ON,
    empty_table,
    parse_counts,
    read_job,
    show_number,
    train_command,
    until_interrupted,
)
from lockstep.config.flags import arg
from lockstep.config.schema import check_workers
from lockstep.diagnosis.phases import STEP_PARTS
from lockstep.errors import ConfigError, LockstepError, require
from lockstep.files.jsonl import read_records
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.controller.manual_job import run_study
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions
from lockstep.report.read_steps import explain_studies
from lockstep.report.scaling_series import (
    QUARTILES,
    THRESHOLD,
    MeasuredPoint,
    Series,
    cautions,
    check_threshold,
    efficiencies,
    judge,
    rate_of,
    series_of,
    unit_of,
)
from lockstep.world.batch_job import describe_requests

if TYPE_CHECKING:
    from lockstep.study.points import Mode, StepPoint
    from lockstep.study.step_jobs import StepJobOutcome

    Commands = dict[StepPoint, Sequence[str]]
    Plans = dict[StepPoint, JobPlan]


@dataclass(frozen=True)
class ScalingCommand:
    """Measure throughput and the time of each part of a step on different numbers of workers.

    A PyTorch program or the flags of `lockstep train` follow `--`; without a DataLoader, add --mode. {np}, {nodes},
    {batch} and {run}, an unused folder, are replaced. To resume, run it again.

    Examples:
        lockstep study scaling -np 1,2,4 -- cifar10 -a resnet18
        lockstep study scaling -np 1,2,4 -- python train.py
        lockstep study scaling -np 1,2 --global-batch 64 -- python a.py -b {batch}
    """

    workers: Annotated[str, arg(name="np", aliases=["-np"], metavar="N,N,...")] = ""
    """Numbers of workers, such as 1,2,4,8."""
    mode: Literal["strong", "weak", "both"] = "both"
    """strong: constant global batch. weak: constant batch per worker, as programs have it by default."""
    global_batch: Annotated[int | None, arg(metavar="N")] = None
    """A program's samples per step; a worker's share replaces {batch}."""
    own_workers: bool = False
    """The program starts its {np} workers itself, such as by mp.spawn."""
    repeats: int = 3
    """Measurements per number of workers, in new processes."""
    steps: int = 30
    """Steps per measurement."""
    warmup_steps: int = 5
    """Warm-up steps before each measurement."""
    threshold: float = THRESHOLD
    """Mark numbers of workers with a lower efficiency."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    seed: int = 0
    """Seed of the random order of measurements."""
    out: Path = Path("study/scaling.jsonl")
    """File to append the records to."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        for flag, value in (("--repeats", self.repeats), ("--steps", self.steps)):
            require(value >= 1, flag, value, "at least 1")
        check_threshold(self.threshold)
        require(self.warmup_steps >= 0, "--warmup-steps", self.warmup_steps, "at least 0")


def main(arguments: Sequence[str]) -> int:
    own, job = split(arguments)
    command = parse(ScalingCommand, "study scaling", own)
    most = max(parse_counts("-np", command.workers))
    return until_interrupted(
        lambda: run_study(command.where, most, lambda where: _study(replace(command, where=where), job))
    )


def _study(command: ScalingCommand, job: Sequence[str]) -> int:
    from lockstep.study.points import is_program

    commands = _program_commands if is_program(job) else _training_commands
    with tempfile.TemporaryDirectory() as scratch:
        about, words = commands(command, job)
        return _measure_all(command, about, _plan(command, words, Path(scratch)))


def _training_commands(command: ScalingCommand, flags: Sequence[str]) -> tuple[dict[str, Any], Commands]:
    config = read_job(flags)
    from lockstep.study.points import about_program, batch_flags, measured_flags, plan_points

    for flag, value in (("--global-batch", command.global_batch), ("--own-workers", command.own_workers or None)):
        require(value is None, flag, value, "left out for flags of `lockstep train`, which has --global-batch-size")
    counts = parse_counts("-np", command.workers)
    modes: tuple[Mode, ...] = ("strong", "weak") if command.mode == "both" else (command.mode,)
    own = [*flags, *measured_flags(config, command.warmup_steps + command.steps)]
    commands: Commands = {}
    for point in plan_points(config, counts, modes, command.repeats, command.seed):
        words = [*own, *batch_flags(config, point.global_batch or 0)]
        if not point.repeat:
            check_workers(parse_train(words).job, point.workers)
        commands[point] = train_command(command.where, words)
    return about_program(["lockstep", "train", *flags]), commands


def _program_commands(command: ScalingCommand, program: Sequence[str]) -> tuple[dict[str, Any], Commands]:
    from lockstep.study.points import about_program, plan_program_points

    mode: Mode = "strong" if command.global_batch is not None or command.mode == "strong" else "weak"
    if command.mode not in ("both", mode):
        raise ConfigError(f"--mode {command.mode}: with --global-batch, scaling is strong; leave out one of them")
    counts = parse_counts("-np", command.workers)
    if command.own_workers and not any("{np}" in word for word in program):
        raise ConfigError("--own-workers needs {np} in the command, such as: -- python train.py --nproc {np}")
    points = plan_program_points(program, counts, mode, command.global_batch, command.repeats, command.seed)
    return about_program(program, mode, command.global_batch), dict.fromkeys(points, program)


def _plan(command: ScalingCommand, commands: Commands, scratch: Path) -> Plans:
    from lockstep.study.step_jobs import plan_measurement

    needs_samples = command.mode == "both" and command.global_batch is None  # to see that the scaling is weak
    length = f"{command.warmup_steps},{command.steps},{needs_samples:d},"
    most = max(point.workers for point in commands)
    return {
        point: plan_measurement(command.where, point, words, length, scratch / str(number), most, command.own_workers)
        for number, (point, words) in enumerate(commands.items())
    }


def _measure_all(command: ScalingCommand, about: Mapping[str, Any], plans: Plans) -> int:
    from lockstep.study.points import check_record_file, key_of, missing_points
    from lockstep.study.step_jobs import about_plan

    settings = {"steps": command.steps, "warmup_steps": command.warmup_steps}

    def describe(point: StepPoint) -> dict[str, Any]:
        return {**about, **settings, **point.to_mapping(), **about_plan(plans[point])}

    points = list(plans)
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
            print(f"[{number}/{len(missing)}] {point.name}: ", end="", flush=True)
            outcome = _measure(point, plans[point], jobs, describe(point), command.out)
            if outcome.was_ended:
                print(f"{TO_GO_ON}; recorded in {command.out}")
                return outcome.code
            code = outcome.code or code or (0 if outcome.figures else LockstepError.exit_code)
    keys = {key_of(describe(point)) for point in points}
    records = read_records(command.out)
    measured = [record for record in records if key_of(record) in keys and "failed" not in record]
    jobs_by_size = {point.workers: about_plan(plan) for point, plan in plans.items()}
    series, verdicts = show_scaling(measured, jobs_by_size, command.threshold), explain_studies(measured)
    for name, verdict in verdicts.items():
        print(f"{name}:", *verdict.lines, sep="\n")
    if command.json:
        bounds = [{"name": name, **verdict.to_mapping()} for name, verdict in verdicts.items()]
        print_json({"series": series, "bounds": bounds})
    print(f"recorded in {command.out}")
    return code


def _introduce(points: Sequence[StepPoint], missing: Sequence[StepPoint], plans: Plans) -> list[str]:
    lines = [f"{len(points)} measurements, {len(points) - len(missing)} of them already recorded"]
    for point in sorted(points, key=lambda point: (point.workers, point.global_batch or 0)):
        if point.repeat == 0:
            plan = plans[point]
            hosts = "" if plan.is_local else f" ({', '.join(f'{node.workers} on {node.host}' for node in plan.nodes)})"
            lines.append(f"  {point.name}{hosts}: {' and '.join(point.modes)}")
    lines.append(f"threads per worker: {plans[points[0]].environment['OMP_NUM_THREADS']}")
    return [*lines, *dict.fromkeys(note for plan in plans.values() for note in plan.notes if "warning" in note)]


def _measure(point: StepPoint, plan: JobPlan, jobs: JobSeries, about: Mapping[str, Any], out: Path) -> StepJobOutcome:
    from lockstep.study.points import append_record
    from lockstep.study.step_jobs import measure_in_job

    outcome = measure_in_job(plan, jobs, point.workers)
    if outcome.was_ended:
        print("interrupted")
        return outcome
    if outcome.samples_unknown:
        print("not measured")
        fix = "pass --mode weak (each worker keeps its batch) or --mode strong (the workers share a global batch)"
        raise ConfigError(f"the program's samples are unknown: {fix}, or call lockstep.step(samples=n) after each step")
    failed = {} if outcome.figures else {"failed": outcome.reason}
    append_record(out, {"kind": "scaling", **about, **failed, **outcome.figures, **describe_requests()})
    if failed:
        print(f"failed: {outcome.reason}")
    else:
        rate = f"{show_number(rate_of(outcome.figures) or 0)} {unit_of(outcome.figures)}"
        unknown = "; whether gradients are exchanged is unknown" if outcome.exchanges_unknown else ""
        print(f"{rate}, {1000 / outcome.figures['steps_per_second']:.3g} ms per step{unknown}")
    return outcome


def show_scaling(
    records: Sequence[Mapping[str, Any]], jobs: Mapping[int, Mapping[str, Any]], threshold: float
) -> list[dict[str, Any]]:
    """Print, and return for `--json`, the medians over the repeats; `jobs` has each size's nodes and threads."""
    console, shown = Console(), list[dict[str, Any]]()
    found = sorted(series_of(records)[0], key=lambda series: series.mode)
    has_strong = any(series.mode == "strong" for series in found)
    for series in found:
        points = series.points
        if len(points) > 1 or series.mode == "strong" or not has_strong:
            lines = [*filter(None, (judge(points, threshold), *cautions(series.mode, points)))]
            lines += [f"energy that is not counted: {line}" for line in series.unread]
            console.print(_throughput(series, jobs, threshold), *lines, _split(points), sep="\n")
            rows = [_row(series, point, jobs[point.workers]) for point in points]
            shown.append({"label": series.label, "mode": series.mode, "rows": rows, "verdict": lines})
    return shown


def _row(series: Series, point: MeasuredPoint, job: Mapping[str, Any]) -> dict[str, Any]:
    name, efficiency = series.rate_name, efficiencies(series.points)[point.workers]
    rates = {name: point.images_per_second, f"min_{name}": min(point.rates), f"max_{name}": max(point.rates)}
    shares = {"speedup": efficiency * point.workers / series.points[0].workers, "efficiency": efficiency}
    energy = {f"joules_per_{name.removesuffix('s_per_second')}": series.joules_per_sample(point)}
    times = {"step_seconds": dict(zip(QUARTILES, point.step_seconds, strict=True)), "split_seconds": point.split}
    mean = point.mean_step_seconds
    return {"workers": point.workers, **job, **rates, **shares, **energy, **times, "mean_step_seconds": mean}


def _throughput(series: Series, jobs: Mapping[int, Mapping[str, Any]], threshold: float) -> Table:
    energies = [series.joules_per_sample(point) for point in series.points]
    energy = (f"J/{series.rate_unit.removesuffix('/s').removesuffix('s')}",) * any(energies)
    headings = ("workers", "nodes", "threads", series.rate_unit, "lowest to highest", "speed-up", "efficiency", *energy)
    table, points = empty_table(f"{series.mode} scaling", headings, narrow=True), series.points
    for point, efficiency, joules in zip(points, efficiencies(points).values(), energies, strict=True):
        table.add_row(
            str(point.workers),
            *map(str, jobs[point.workers].values()),
            show_number(point.images_per_second),
            f"{show_number(min(point.rates))} to {show_number(max(point.rates))}",
            f"{efficiency * point.workers / points[0].workers:.2f}",
            f"{100 * efficiency:.0f} %{' *' if efficiency < threshold else '  '}",
            *((f"{joules:.4g}" if joules else "-",) * any(energies)),
        )
    return table


def _split(points: Sequence[MeasuredPoint]) -> Table:
    recorded = {name: part.name for name, part in STEP_PARTS.items() if name in (points[0].split or {})}
    table = empty_table("milliseconds per step", ("workers", "quartiles", "mean", *recorded.values()), narrow=True)
    for point in points:
        low, _, high = map(_milliseconds, point.step_seconds)
        times = point.mean_step_seconds, *((point.split or {}).get(part) for part in recorded)
        table.add_row(str(point.workers), f"{low}–{high}", *map(_milliseconds, times))
    return table


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    time = 1000 * seconds
    return f"{time:,.{2 if time < 9.995 else 1 if time < 99.95 else 0}f}"
