"""Running a command's work in its workers: in this process, in the launcher's, or in N that are started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from lockstep.config.device_choice import BackendChoice, DeviceChoice
from lockstep.errors import ConfigError
from lockstep.launch.controller.restarts import first_hosts
from lockstep.launch.plan.allocation import find_allocation
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, plan_from
from lockstep.launch.plan.restart_options import RestartOptions
from lockstep.launch.worker_exit import exit_code_of
from lockstep.world import accelerator
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, usable_cores


@dataclass(frozen=True)
class Elastic:
    """Workers that may be started more than once.

    Args:
        words: What they are told besides, by the number of workers at first.
        words_of_now: What they are told besides in any further start.
        can_resize: They stop after a step with a checkpoint when they get SIGUSR1.
        describe_resume: Return the newest checkpoint and the command that resumes from it; "" without a checkpoint.
    """

    options: RestartOptions
    arguments: Callable[[int], list[str]]
    extra_arguments: Callable[[], list[str]]
    can_resize: bool
    describe_resume: Callable[[], str]


@dataclass(frozen=True)
class WorkerCommand:
    """A command of Lockstep's own, whose work is done in workers.

    Args:
        words: The command line, without `lockstep`.
        work: What each worker does.
        workers: How many; None: 1, or as many as an allocation or the hosts have slots.
        backend: What carries the gradients.
        where: The hosts, or what else is said of the launch.
        check: Called with the number of workers before any is started; raises what should stop the job.
        elastic: The workers may be started more than once.
        quiet: Print of the plan's notes only warnings.
        check_start: Called by --dry-run with the number of workers; returns lines on what was found, and raises what
            would stop the job.
    """

    arguments: Sequence[str]
    work: Callable[[World], None]
    device: DeviceChoice
    workers: int | Literal["auto"] | None = None
    backend: BackendChoice = "auto"
    where: LaunchOptions = field(default_factory=LaunchOptions)
    check: Callable[[int], None] = lambda size: None
    elastic: Elastic | None = None
    quiet: bool = False
    check_start: Callable[[int], list[str]] = lambda size: []


def run_workers(job: WorkerCommand) -> int:
    """Do the job's work in every worker, and return this process's exit code.

    Inside a launcher such as torchrun this process is one of its workers. Otherwise they are started, each with the
    same command line; a single one is this process itself.
    """
    where, workers, elastic = job.where, job.workers, job.elastic
    rank_info = RankInfo.from_environment()
    if rank_info.launcher != "none":
        if elastic:
            _check_elastic(rank_info)
            workers = None  # there may be more or fewer now
        started = rank_info.local_size if where.is_manual else rank_info.size
        if not where.dry_run:
            return _work(job, rank_info, workers, started)
        if rank_info.rank == 0:
            _check_number(workers, rank_info, started)
            said = f"# {rank_info.launcher} has started {started} worker{'s' if started > 1 else ''} for this command"
            print(f"{_found(job, rank_info.size)}{said}")
        return 0
    if elastic:
        where = first_hosts(where, elastic.options)
    if workers is None and not where.names_hosts and not find_allocation(os.environ):
        workers = 1
    again = [where.python or sys.executable, "-m", "lockstep", *without_dry_run(job.arguments)]
    gpus = partial(_one_a_gpu, job.device)
    plan = plan_from(where, workers, again, os.environ, usable_cores(), gpus, names_of_this_machine())
    if not plan.manual:
        job.check(plan.workers)
    if elastic:
        elastic.options.check(plan.workers)
        job.check(elastic.options.max_np or plan.workers)
        plan = replace(plan, command=(*plan.command, *elastic.arguments(plan.workers)))
    elif plan.workers == 1 and plan.is_local and not where.dry_run:
        return _work(job, rank_info, workers, 1)
    if where.dry_run:
        from lockstep.launch.plan.dry_run import describe

        nodes = plan.manual.nodes if plan.manual else 1  # of which each has as many workers, as far as is known
        print(_found(job, plan.workers * nodes) + describe(plan))
        return 0
    return _launch(plan, where, gpus, elastic, job.quiet)


def without_dry_run(arguments: Sequence[str]) -> list[str]:
    """A command's arguments without the flag that only prints them."""
    return [argument for argument in arguments if argument.replace("_", "-") != "--dry-run"]


def _found(job: WorkerCommand, workers: int) -> str:
    """What a dry run finds out about the start of so many workers, as comments of a shell."""
    return "".join(f"# {line}\n" for line in job.check_start(workers))


def _one_a_gpu(device: str) -> int:
    return max(1, accelerator.count()) if device != "cpu" else 1


def _check_elastic(rank_info: RankInfo) -> None:
    if rank_info.snapshots is None:
        raise ConfigError(
            f"--max-restarts and related flags are for the launcher, but {rank_info.launcher} has started this one: "
            f"give them to `lockstep run`, or start the job by `lockstep train` alone"
        )


def _launch(plan: JobPlan, where: LaunchOptions, gpus: Callable[[], int], elastic: Elastic | None, quiet: bool) -> int:
    from lockstep.launch.controller.job import run_job
    from lockstep.launch.controller.restarts import elastic_job, run_elastic_job
    from lockstep.launch.output.display import OutputPlan

    for note in plan.notes:
        if not quiet or note.startswith("warning"):
            print(note, flush=True)
    output, direct_stdout = OutputPlan(plan.workers, prefixed=False), sys.stdout.isatty()
    if not elastic:
        return run_job(plan, output, direct_stdout=direct_stdout)
    job = elastic_job(
        plan, where, elastic.options, gpus, elastic.can_resize, elastic.extra_arguments, elastic.describe_resume
    )
    return run_elastic_job(job, output, direct_stdout)


def _work(job: WorkerCommand, rank_info: RankInfo, expected: int | Literal["auto"] | None, started: int) -> int:
    """Be one of the workers, of whom so many have been started."""
    check = partial(_check_number, expected, rank_info, started)
    return exit_code_of(job.work, rank_info, job.device, job.backend, check)


def _check_number(expected: int | Literal["auto"] | None, rank_info: RankInfo, started: int) -> None:
    if expected not in (None, "auto", started):
        raise ConfigError(f"-np {expected}, but {rank_info.launcher} has started {started} workers; leave -np out")
