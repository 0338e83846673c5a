"""Run a command's work in its workers: this process, the processes of another launcher, or N new processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from lockstep.config.schema import BackendChoice, DeviceChoice
from lockstep.diagnosis.idle_clock import HANG_TIMEOUT
from lockstep.errors import ConfigError, plural
from lockstep.files.output import keep_going, say
from lockstep.files.staged import STAGED
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.launch.controller.job_series import JobSeries
from lockstep.launch.controller.restarts import elastic_job, first_hosts, run_elastic_job
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.containers import PACKAGES
from lockstep.launch.plan.hosts import find_allocation, names_of_this_machine
from lockstep.launch.plan.job_plan import IMPORTANT, JobPlan, describe_plan
from lockstep.launch.plan.options import LaunchOptions, RestartOptions, plan_from
from lockstep.launch.worker_exit import exit_code_of
from lockstep.world import accelerator
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World


@dataclass(frozen=True)
class Elastic:
    """How a command's workers, which leave a generation between two steps, are restarted.

    Args:
        arguments: Return the workers' additional arguments, given their initial number.
        describe_resume: Return the newest checkpoint and the command that resumes from it; "" without a checkpoint.
    """

    options: RestartOptions
    arguments: Callable[[int], list[str]]
    describe_resume: Callable[[], str]


@dataclass(frozen=True)
class WorkerCommand:
    """A Lockstep command that runs in workers.

    Args:
        arguments: The command line, without `lockstep`.
        work: Called in each worker.
        workers: The number of workers; None: 1, or the number of slots of the allocation or the hosts.
        backend: The library for communication.
        where: The launch options.
        check: Called with the number of workers before any is started; raises an error to prevent the start.
        elastic: Restarts, if any.
        quiet: Print only warnings of the plan's notes.
        end: Receives how the job ended; a single worker then gets a process of its own.
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
    end: JobEnd | None = None


def run_workers(job: WorkerCommand) -> int:
    """Do the job's work in every worker, and return this process's exit code.

    Under a launcher such as torchrun, this process is one of the workers. Otherwise this starts them with the same
    command line; a single worker is this process.
    """
    where, workers, elastic = job.where, job.workers, job.elastic
    rank_info = RankInfo.from_environment()
    if rank_info.launcher != "none":
        _check_flags(job, rank_info)
        if elastic:
            workers = None  # a restart may have another number
        started = rank_info.local_size if where.is_manual else rank_info.size
        if not where.dry_run:
            keep_going()
            return _work(job, rank_info, workers, started)
        if rank_info.rank == 0:
            _check_number(workers, rank_info, started)
            print(f"# {rank_info.launcher} has started {plural(started, 'worker')} for this command")
        return 0
    if elastic:
        where = first_hosts(where, elastic.options)
    if workers is None and not where.names_hosts and not find_allocation(os.environ):
        workers = 1
    again = [where.python_of_workers, "-m", "lockstep", *without(job.arguments, "--dry-run", "--json")]
    gpus = accelerator.count if job.device != "cpu" else int  # int() is 0
    plan = plan_from(where, workers, again, os.environ, usable_cores(), gpus, names_of_this_machine())
    if plan.manual and not where.dry_run:
        from lockstep.launch.controller.manual_job import run_manual_job

        keep_going()
        return run_manual_job(plan, where, lambda joined: run_workers(replace(job, where=joined, workers=None)))
    if not plan.manual:
        job.check(plan.workers)
    if elastic:
        elastic.options.check(plan.workers)
        job.check(elastic.options.max_np or plan.workers)
        added = (*elastic.arguments(plan.workers),)
        plan = replace(plan, command=(*plan.command, *added), added=added)
    elif plan.workers == 1 and plan.is_local and not (where.dry_run or plan.container or plan.staging or job.end):
        keep_going()
        for note in (note for note in plan.notes if note.startswith(IMPORTANT)):
            say(note, sys.stdout)
        return _work(job, rank_info, workers, 1)
    if where.dry_run:
        print(describe_plan(plan))
        return 0
    keep_going()
    return _launch(plan, replace(job, where=where), gpus)


def without(arguments: Sequence[str], *switches: str) -> list[str]:
    """Return a command's arguments without some switches."""
    return [argument for argument in arguments if argument.replace("_", "-") not in switches]


def _check_flags(job: WorkerCommand, rank_info: RankInfo) -> None:
    """Refuse flags that only Lockstep's launcher obeys, in a worker of another launcher."""
    launched = f"for the launcher, but {rank_info.launcher} has started this process"
    if job.elastic and rank_info.snapshots is None:
        fix = "pass them to `lockstep run`, or start the job with `lockstep train` alone"
        raise ConfigError(f"--max-restarts and related flags are {launched}: {fix}")
    if job.where.containers.container and PACKAGES not in os.environ:
        fix = "let it start the container, or start the job by `lockstep train` alone"
        raise ConfigError(f"--container is {launched}: {fix}")
    if job.end:
        raise ConfigError(f"--json is {launched}; start the job by `lockstep train` alone")
    if job.where.staging.stage and STAGED not in os.environ:
        raise ConfigError(f"--stage is {launched}; start the job by `lockstep train` alone")


def _launch(plan: JobPlan, command: WorkerCommand, gpus: Callable[[], int]) -> int:
    for note in plan.notes:
        if not command.quiet or note.startswith(IMPORTANT):
            say(note, sys.stdout)
    plan, output = replace(plan, direct_stdout=sys.stdout.isatty()), OutputPlan(plan.workers, prefixed=False)
    if not (elastic := command.elastic):
        with JobSeries() as jobs:
            return jobs.run(plan, output, end=command.end)
    job = elastic_job(plan, command.where, elastic.options, gpus, True, elastic.describe_resume)
    return run_elastic_job(job, output, end=command.end)


def _work(job: WorkerCommand, rank_info: RankInfo, expected: int | Literal["auto"] | None, started: int) -> int:
    """Do the work as one of `started` workers, and return the exit code."""
    if job.where.hang_timeout is not None:  # the launcher's own; under other launchers the workers watch themselves
        os.environ[HANG_TIMEOUT] = f"{job.where.hang_timeout:g}"
    check = partial(_check_number, expected, rank_info, started)
    return exit_code_of(job.work, rank_info, job.device, job.backend, check)


def _check_number(expected: int | Literal["auto"] | None, rank_info: RankInfo, started: int) -> None:
    if expected not in (None, "auto", started):
        raise ConfigError(f"-np {expected}, but {rank_info.launcher} has started {started} workers; remove -np")
