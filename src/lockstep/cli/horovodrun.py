"""`horovodrun`: Horovod's command line for Lockstep's launcher, a script of the `lockstep-horovod` distribution.

The command line takes precedence over the configuration file.
The exit code is 0, 1 if a worker failed (as in Horovod), 2 for an invalid flag, or 128 + N if signal N stopped the job.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep import __version__
from lockstep.cli import parse as parsing
from lockstep.cli import prepare_streams
from lockstep.cli.observed_job import run_observed
from lockstep.errors import INTERRUPTED, ConfigError, LockstepError
from lockstep.files.output import keep_going, say, with_output
from lockstep.files.untrusted import MAX_YAML_BYTES, parse_yaml
from lockstep.launch.controller.discovery import POLL_SECONDS, discover
from lockstep.launch.plan.horovodrun_plan import ELASTIC_SECONDS, FLAGS, GROUPS, HorovodFlag, HorovodPlan, plan_horovod
from lockstep.launch.plan.hosts import Host, names_of_this_machine, slots_of
from lockstep.launch.plan.job_plan import IMPORTANT
from lockstep.observe.job_steps import JobSteps
from lockstep.world.devices import usable_cores

FAILED = 1
ABOUT = """Run a command on N workers, for scripts that use Horovod's API.

Examples:
    horovodrun -np 4 python train.py
    horovodrun -np 16 -H host1:8,host2:8 python train.py
"""
SELDOM = ("Tuning", "Timeline, stalls and log")
# Sections of the configuration file whose keys are flags without the section's name as a prefix.
PLAIN_SECTIONS = ("params", "library_options", "elastic")
CONTROLLERS = ("gloo", "mpi", "jsrun")
SPECIAL_KEYS = {
    ("elastic", "timeout"): "elastic_timeout",
    ("autotune", "enabled"): "autotune",
    ("stall_check", "enabled"): "stall_check",
    ("logging", "level"): "log_level",
    ("logging", "hide_timestamp"): "log_hide_timestamp",
    ("logging", "with_timestamp"): "log_with_timestamp",
}


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
        hosts = _discovered(vars(flags))
        plan = plan_horovod(vars(flags), flags.command, usable_cores(), os.environ, names, hosts)
        plan.job.check_program()
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
    job = plan.job
    for note in job.notes:
        if note.startswith(IMPORTANT) and not verbose:
            say(f"horovodrun: {note}")
    if verbose:
        lines = [
            *job.notes,
            *(f"{name}={value}" for name, value in job.environment.items() if value),
            shlex.join(job.command),
        ]
        say("\n".join(f"horovodrun: {line}" for line in lines), sys.stdout)
    return run_observed(job.command, lambda own, steps: _run_job(plan, own, steps))


def _run_job(plan: HorovodPlan, own: Mapping[str, str], steps: JobSteps | None) -> int:
    job = replace(plan.job, environment={**plan.job.environment, **own})
    if plan.restarts is None:
        from lockstep.launch.controller.job_series import JobSeries

        with JobSeries() as jobs:
            return jobs.run(job, plan.output, failure_code=FAILED, steps=steps)
    from lockstep.launch.controller.restarts import elastic_job, run_elastic_job

    # The workers leave a generation at a commit when hosts return or are added.
    variables = {**plan.variables, **own}
    elastic = elastic_job(job, plan.where, plan.restarts, lambda: 0, can_resize=True, variables=variables)
    elastic = replace(elastic, slots_per_host=plan.slots_per_host, failure_code=FAILED)
    return run_elastic_job(replace(elastic, must_stay=True, limit_flag="--reset-limit"), plan.output, steps)


def _discovered(flags: Mapping[str, Any]) -> Sequence[Host]:
    """Return the hosts that the discovery script prints; empty without a script.

    Wait up to the elastic timeout until they have enough slots for the job.

    Raises:
        ConfigError: The script failed.
    """
    script = flags.get("host_discovery_script")
    if not script:
        return ()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # signals that `nohup` or a shell ignores stay ignored
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    hosts = discover(script, flags.get("slots_per_host"))
    needed = flags.get("num_proc") or flags.get("min_np") or 1
    deadline = time.monotonic() + (flags.get("elastic_timeout") or ELASTIC_SECONDS)
    if slots_of(hosts) < needed:
        say(f"lockstep: {slots_of(hosts)} slots are available, and the job needs {needed}; waiting for hosts")
    while slots_of(hosts) < needed and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        hosts = discover(script, flags.get("slots_per_host"))
    return hosts


def parse_flags(arguments: Sequence[str]) -> SimpleNamespace:
    """Return the values of the flags and, as `command`, the arguments after them. A flag that is not given is None.

    Raises:
        ConfigError: An argument is invalid, or the file of --config-file cannot be read or has an unknown key.
    """
    flags = [*FLAGS.values()]
    values, _, command = parsing.parse_flags(flags, "horovodrun", arguments, before_command=True)
    if file := values.get(("config_file",)):
        arguments = [*arguments_of_file(Path(file)), *arguments]
        values, _, command = parsing.parse_flags(flags, "horovodrun", arguments, before_command=True)
    return SimpleNamespace(**{name: values.get((name,)) for name in FLAGS}, command=command)


def arguments_of_file(path: Path) -> list[str]:
    """Return the flags of a configuration file, as command-line arguments.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or has an unknown key.
    """
    try:
        with path.open("rb") as file:
            content = parse_yaml(file.read(MAX_YAML_BYTES + 1))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from None
    if not isinstance(content or {}, dict):
        raise ConfigError(f"--config-file {path}: expected sections or flags with their values")
    flags = {_key(name): (name, flag) for flag in FLAGS.values() for name in (*flag.names, *flag.switches)}
    arguments: list[str] = []
    for key, name, value in _entries(content or {}):
        if name == "controller":
            if value not in CONTROLLERS:
                raise ConfigError(f"--config-file {path}: {key} is {' or '.join(CONTROLLERS)}, not {value}")
            name, value = value, True
        if name not in flags or name in ("help", "help_all", "config_file"):
            raise ConfigError(f"--config-file {path}: unknown flag {key}; `horovodrun --help` lists the flags")
        option, flag = flags[name]
        if flag.is_switch:
            wanted = flag.switches[option] if value else not flag.switches[option]
            arguments += [switch for switch, meaning in flag.switches.items() if meaning == wanted][:1]
        elif value is not None:
            values = map(str, value if isinstance(value, list) else [value])
            arguments += [option, *values] if flag.count > 1 else [f"{option}={text}" for text in values]
    return arguments


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each value's key in the file, its flag's name, and the value."""
    for section, values in content.items():
        if not isinstance(values, dict):
            yield section, _key(section), values
            continue
        for key, value in values.items():
            prefix = "" if section in PLAIN_SECTIONS else f"{_key(section)}_"
            name = SPECIAL_KEYS.get((_key(section), _key(key)), prefix + _key(key))
            yield f"{section}.{key}", name, value


def _key(name: Any) -> str:
    return str(name).lstrip("-").replace("-", "_")


def _help(shows_all: bool) -> str:
    """Return the help page; without `shows_all`, flags that have no effect or are rarely used are omitted."""
    from lockstep.cli.help import page, sentence_case

    sections = {
        title: {
            _term(flag, shows_all): sentence_case(flag.text)
            for flag in flags
            if "--help" not in flag.names[-1] and (shows_all or (not flag.reason and flag.name != "controller"))
        }
        for title, flags in GROUPS.items()
        if shows_all or title not in SELDOM
    }
    more = "" if shows_all else "`horovodrun --help-all` shows all flags."
    return page("horovodrun -np N [flags] COMMAND ...", ABOUT, sections, more)


def _term(flag: HorovodFlag, all_names: bool) -> str:
    """Return a flag's short and first long name, or its first three names, with its metavar."""
    names = sorted(dict.fromkeys([*flag.names, *flag.switches]), key=lambda name: name.startswith("--"))
    first_long = next(name for name in names if name.startswith("--"))
    shown = names[:3] if all_names else dict.fromkeys([names[0], first_long])
    return f"{', '.join(shown)} {flag.metavar}".strip()


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
