"""`lockstep run`: run any command as the workers of a job."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from lockstep.cli import HELP
from lockstep.cli.json_output import with_job_end
from lockstep.cli.observed_job import run_observed
from lockstep.cli.parse import parse
from lockstep.config.flags import arg
from lockstep.config.run_paths import is_training
from lockstep.errors import ConfigError
from lockstep.files.output import has_terminal, keep_going, restored_terminal, say
from lockstep.launch.controller.job_outcome import JobEnd
from lockstep.launch.controller.restarts import first_hosts
from lockstep.launch.node.hardware import count_gpus
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.hosts import names_of_this_machine
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, RestartOptions, plan_from
from lockstep.observe.job_steps import JobSteps
from lockstep.world.devices import usable_cores

LOGS = Path("lockstep-logs")


@dataclass(frozen=True)
class RunCommand:
    """Run any command as the workers of a job, on this machine, on hosts, or in a batch job.

    Examples:
        lockstep run -np 4 -- python train.py
        lockstep run -H host1:8,host2:8 -- python train.py
    """

    where: LaunchOptions = field(default_factory=LaunchOptions)
    workers: Annotated[int | Literal["auto"] | None, arg(name="np", aliases=["-np"], metavar="N|auto")] = None
    """Number of workers, per node with --nodes. Default: one per slot or GPU, or 1."""
    prefix: bool = False
    """Prefix each line of output with [rank]<stream>."""
    restarts: RestartOptions = field(default_factory=RestartOptions)
    log_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for worker-N.log files. Default: a new one, in lockstep-logs."""
    observe: bool = True
    """Do not time the steps of PyTorch programs to find slow workers, and do not compare what they train."""
    observe_dir: Annotated[Path | None, arg(metavar="DIR")] = None
    """New folder for records of steps, for watch and report."""
    json: bool = False
    """Print how the job ended as JSON."""


def main(arguments: Sequence[str]) -> int:
    flags, command = split(arguments)
    return with_job_end(partial(_main, flags, command), "--json" in flags)


def _main(flags: Sequence[str], command: Sequence[str], end: JobEnd) -> int:
    options = parse(RunCommand, "run", flags)
    if not command:
        raise ConfigError("missing COMMAND; add it after the flags: lockstep run -np 2 -- python train.py")
    options = replace(options, where=first_hosts(options.where, options.restarts))
    plan = _plan(options, command)
    if options.where.dry_run:
        from lockstep.launch.plan.job_plan import describe_plan

        print(describe_plan(plan))
        return 0
    if options.observe_dir and (not options.observe or is_training(command)):
        why = "--no-observe" if not options.observe else "`lockstep train` writes its own records"
        raise ConfigError(f"--observe-dir {options.observe_dir}: contradicts {why}; remove it")
    plan.check_program()
    keep_going()
    if not plan.manual:
        return _execute(plan, options, end)
    from lockstep.launch.controller.manual_job import run_manual_job

    def launch(joined: LaunchOptions) -> int:
        again = replace(options, where=joined, workers=None)
        return _execute(_plan(again, command), again, end)

    return run_manual_job(plan, options.where, launch)


def _plan(options: RunCommand, command: Sequence[str]) -> JobPlan:
    here, cores = names_of_this_machine(), usable_cores()
    return plan_from(options.where, options.workers, command, os.environ, cores, count_gpus, here)


def _execute(plan: JobPlan, options: RunCommand, end: JobEnd) -> int:
    options.restarts.check(plan.workers)
    for note in plan.notes:
        say(note, sys.stdout)

    def run(own: Mapping[str, str], steps: JobSteps | None) -> int:
        return _run(replace(plan, environment={**plan.environment, **own}), options, own, steps, end)

    return run_observed(plan.command, run, options.observe_dir, options.observe, end)


def _run(plan: JobPlan, options: RunCommand, own: Mapping[str, str], steps: JobSteps | None, end: JobEnd) -> int:
    from lockstep.launch.controller.job_series import JobSeries
    from lockstep.launch.controller.restarts import elastic_job, run_elastic_job

    is_piped = options.prefix or options.log_dir or options.restarts.is_elastic or plan.container or options.json
    if plan.workers == 1 and plan.is_local and not is_piped and has_terminal():
        plan = replace(plan, terminal=True)
    logs = None if plan.terminal else options.log_dir or new_logs()
    output = OutputPlan(plan.workers, prefixed=options.prefix, logs=logs)
    if not options.restarts.is_elastic:
        with restored_terminal() if plan.terminal else nullcontext(), JobSeries() as jobs:
            return jobs.run(plan, output, steps=steps, end=end)
    job = elastic_job(plan, options.where, options.restarts, count_gpus, variables=own)
    return run_elastic_job(job, output, steps, end)


def new_logs() -> Path | None:
    """Create a folder for logs; return None, with a warning, if that is impossible: it was not requested."""
    logs = LOGS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    try:
        logs.mkdir(parents=True)
    except OSError as error:
        say(f"lockstep: warning: no logs: {logs}: {error.strerror}; choose a folder with --log-dir DIR")
        return None
    return logs


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the flags, with their values, and the command; "--" may separate them."""
    names = ("prefix", "dry-run", "preload", "observe", "own-workers", "json")
    plain = {f"--{no}{name}" for name in names for no in ("", "no-")} | set(HELP)
    position = 0
    while position < len(arguments) and arguments[position].startswith("-"):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :])
        position += 1 if argument in plain or "=" in argument else 2
    return list(arguments[:position]), list(arguments[position:])
