"""`horovodrun`: Horovod's command line for Lockstep's launcher, a script of the `lockstep-horovod` distribution.

The exit code is 0, 1 if a worker failed (as in Horovod), 2 for an invalid flag, or 128 + N if signal N stopped the job.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep import __version__
from lockstep.cli import prepare_streams
from lockstep.errors import INTERRUPTED, ConfigError, LockstepError
from lockstep.files.output import keep_going, say, with_output
from lockstep.launch.controller.discovery import POLL_SECONDS, discover
from lockstep.launch.controller.signals import on_stopping
from lockstep.launch.plan.horovodrun_flags import REFUSED, build_parser, parse_flags, value_of
from lockstep.launch.plan.horovodrun_plan import ELASTIC_SECONDS, ElasticPlan, HorovodPlan, HostsPlan, plan_horovod
from lockstep.launch.plan.hosts import Host, are_here, names_of_this_machine, slots_of
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.world.world import usable_cores

FAILED = 1
ABOUT = """Run a command on N workers, for scripts that use Horovod's API.

Examples:
    horovodrun -np 4 python train.py
    horovodrun -np 16 -H host1:8,host2:8 python train.py
"""
TITLES = {"options": "Job"}
SELDOM = ("Tuning", "Timeline, stalls and log")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the arguments describe, and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    prepare_streams()
    return with_output(lambda: _main(given), "horovodrun")


def _main(arguments: Sequence[str]) -> int:
    try:
        flags = parse_flags(arguments)
        if flags.help or flags.help_all:
            print(_help(shows_all=flags.help_all))
            return 0
        if flags.version:
            print(f"Lockstep {__version__}, with the interface of Horovod 0.28.1")
            return 0
        if flags.check_build:
            print(_build())
            return 0
        names = names_of_this_machine()
        hosts = _discovered(vars(flags), names)
        plan = plan_horovod(vars(flags), flags.command, usable_cores(), os.environ, names, hosts)
        if not shutil.which(flags.command[0]):
            raise ConfigError(f"{flags.command[0]}: command not found; to run a script, put `python` before it")
        return _run(plan, flags.verbose)
    except LockstepError as error:
        say(f"horovodrun: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:  # before the job sets its signal handlers
        say("\nhorovodrun: interrupted")
        return INTERRUPTED


def _run(plan: HorovodPlan, verbose: bool) -> int:
    keep_going()
    for warning in plan.warnings:
        say(f"horovodrun: {warning}")
    job = plan.job if isinstance(plan.job, JobPlan) else plan.job.job
    for note in job.notes:
        if note.startswith("warning") and not verbose:
            say(f"horovodrun: {note}")
    if verbose:
        lines = [*job.notes, *(f"{name}={value}" for name, value in job.environment.items()), shlex.join(job.command)]
        say("\n".join(f"horovodrun: {line}" for line in lines), sys.stdout)
    if isinstance(plan.job, ElasticPlan):
        from lockstep.launch.controller.local_elastic import run_elastic

        return run_elastic(plan.job, plan.output)
    if isinstance(plan.job, HostsPlan):
        return _run_on_hosts(plan.job, plan)
    from lockstep.launch.controller.job import run_job

    return run_job(plan.job, plan.output, failure_code=FAILED)


def _run_on_hosts(job: HostsPlan, plan: HorovodPlan) -> int:
    """Run an elastic job on several hosts. Its workers restart at a commit when hosts return or are added."""
    from lockstep.launch.controller.restarts import elastic_job, run_elastic_job

    plain = elastic_job(job.job, job.where, job.restarts, lambda: 0, can_resize=True)

    def plan_on(hosts: Sequence[Host]) -> JobPlan:
        now = plain.plan_on(hosts)
        return replace(now, environment={**now.environment, **job.variables})

    own = replace(plain, plan_on=plan_on, slots_per_host=job.slots_per_host, failure_code=FAILED)
    return run_elastic_job(own, plan.output)


def _discovered(flags: Mapping[str, Any], names: frozenset[str]) -> Sequence[Host]:
    """Return the hosts that the discovery script prints; empty without a script.

    If any host is remote, wait up to the elastic timeout until the hosts have enough slots for the job.

    Raises:
        ConfigError: The script failed.
    """
    script = flags.get("host_discovery_script")
    if not script:
        return ()
    on_stopping(lambda number, frame: sys.exit(128 + number))
    hosts = discover(script, flags.get("slots_per_host"))
    needed = flags.get("num_proc") or flags.get("min_np") or 1
    deadline = time.monotonic() + (flags.get("elastic_timeout") or ELASTIC_SECONDS)
    if slots_of(hosts) < needed and not are_here(hosts, names):
        say(f"lockstep: {slots_of(hosts)} slots are available, and the job needs {needed}; waiting for hosts")
    while slots_of(hosts) < needed and not are_here(hosts, names) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        hosts = discover(script, flags.get("slots_per_host"))
    return hosts


def _help(shows_all: bool) -> str:
    """Return the help page; without `shows_all`, flags that have no effect or are rarely used are omitted."""
    from lockstep.cli.help import page, sentence_case

    parser = build_parser()
    sections: dict[str, dict[str, str]] = {}
    for group in parser._action_groups:
        title = TITLES.get(group.title or "", sentence_case(group.title or ""))
        if shows_all or title not in SELDOM:
            sections[title] = {
                _term(action, shows_all): sentence_case(action.help or "")
                for action in group._group_actions
                if action.option_strings
                and "help" not in action.dest
                and (shows_all or action.help not in ("no effect", REFUSED))
            }
    more = "" if shows_all else "`horovodrun --help-all` shows all flags."
    return page("horovodrun -np N [flags] COMMAND ...", ABOUT, sections, more)


def _term(action: argparse.Action, all_names: bool) -> str:
    names = sorted(action.option_strings, key=lambda name: name.startswith("--"))
    shown = names if all_names or len(names) < 2 else [names[0], next((n for n in names if n.startswith("--")), "")]
    return f"{', '.join(dict.fromkeys(shown))} {value_of(action)}".strip()


def _build() -> str:
    """Return the features of this installation, in Horovod's format."""
    import torch.distributed as dist

    parts = {
        "Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Controllers": {"MPI (but mpirun can start workers)": False, "Gloo": True},
        "Tensor Operations": {
            "NCCL": dist.is_nccl_available(),
            "DDL": False,
            "CCL": False,
            "MPI": False,
            "Gloo": dist.is_gloo_available(),
        },
    }
    lines = [f"Lockstep {__version__}, with the interface of Horovod 0.28.1"]
    for title, items in parts.items():
        marks = [f"    [{'X' if there else ' '}] {item}" for item, there in items.items()]
        lines += ["", f"Available {title}:", *marks]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
