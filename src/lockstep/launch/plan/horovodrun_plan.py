"""Translate `horovodrun`'s flags into a job plan, the workers' variables and output, and warnings.

The only side effect is reading files that flags name. An elastic job on this machine keeps the processes of survivors
(`lockstep.launch.controller.local_elastic`); one on several hosts restarts all workers
(`lockstep.launch.controller.restarts`).

The names of flags and variables are those of Horovod 0.28. A flag's key is its long name with underscores; a value of
None, or a missing key, means that it was not given.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.horovodrun_flags import FLAGS, NO_MPI
from lockstep.launch.plan.hosts import Host, are_here, parse_hosts, read_hostfile, slots_here, slots_of
from lockstep.launch.plan.job_plan import JobPlan, plan_local
from lockstep.launch.plan.options import ElasticRules, LaunchOptions, RestartOptions, on_hosts, plan_from
from lockstep.world.store import start_limit

RESTARTS = 100  # without --reset-limit, so that a job whose script always fails ends
ELASTIC_SECONDS = 600.0  # the default time to wait for enough slots
WORKERS = 1000  # without --max-np, for a script that may print any number of hosts

_ONE_MACHINE = "a job on one machine needs no SSH"
_LOOPBACK = "a job on one machine uses its loopback interface"
FOR_OTHER_HOSTS = {
    "ssh_port": _ONE_MACHINE,
    "ssh_identity_file": _ONE_MACHINE,
    "network_interfaces": _LOOPBACK,
}
_NOT_ELASTIC = "this job is not elastic; add --min-np or --host-discovery-script"
ON_SEVERAL_HOSTS = {"blacklist_cooldown_range": "a host that failed is reused as soon as it is reachable"}
ELASTIC_ONLY = ("slots_per_host", "elastic_timeout", "reset_limit", "blacklist_cooldown_range")
REFUSED = {
    "mpi": f"{NO_MPI}. Remove --mpi, or start the workers with `mpirun -np N python script.py`, which is supported",
    "jsrun": f"jsrun is not used: {NO_MPI}. Remove --jsrun, or start the workers with `jsrun` itself",
}


@dataclass(frozen=True, kw_only=True)
class ElasticPlan(ElasticRules):
    """An elastic job on this machine.

    Args:
        job: The workers' command and variables.
        slots: The slots of fixed hosts; 0 with a discovery script.
        discovery_script: Prints the current hosts and slots; "" if they are fixed.
        slots_per_host: Slots of the script's hosts without a number.
    """

    job: JobPlan
    slots: int
    discovery_script: str
    slots_per_host: int | None


@dataclass(frozen=True)
class HostsPlan:
    """An elastic job over several hosts, whose workers are all restarted on the available hosts.

    Args:
        job: The plan of the first start.
        where: The hosts, and how to reach them.
        restarts: The limits for restarts and for the number of workers.
        variables: The variables that the flags set, for all workers of each start.
        slots_per_host: Slots of the script's hosts without a number.
    """

    job: JobPlan
    where: LaunchOptions
    restarts: RestartOptions
    variables: Mapping[str, str]
    slots_per_host: int | None


@dataclass(frozen=True)
class HorovodPlan:
    """What `horovodrun` executes: print `warnings`, then start `job` and show its output as in `output`."""

    job: JobPlan | ElasticPlan | HostsPlan
    output: OutputPlan
    warnings: tuple[str, ...]


def plan_horovod(
    flags: Mapping[str, Any],
    command: Sequence[str],
    cores: int,
    environment: Mapping[str, str],
    names: Collection[str],
    discovered: Sequence[Host] = (),
) -> HorovodPlan:
    """Plan the job that the flags describe.

    Args:
        cores: Usable cores, to be divided among the workers.
        environment: The launcher's environment.
        names: The names of this machine.
        discovered: The first hosts of the discovery script, if there is one.

    Raises:
        ConfigError: A flag is invalid or missing, or Lockstep does not support it.
    """
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    if reason := REFUSED.get(given.get("controller", "")):
        raise ConfigError(f"--{given['controller']}: {reason}")
    if not command:
        raise ConfigError("missing COMMAND; add it after the flags: horovodrun -np 2 python train.py")
    elastic = any(name in given for name in ("min_np", "max_np", "host_discovery_script"))
    hosts = (_hosts(given) or discovered) if elastic else ()
    several = not are_here(hosts, names)
    slots = slots_here(hosts, names) if hosts and not several and "host_discovery_script" not in given else None
    if elastic and not several:
        job = plan_local(_most_workers(given, slots), command, cores, environment)
        job = replace(job, start_timeout=given.get("start_timeout") or start_limit(environment) or job.start_timeout)
    else:
        where = _where(given)
        where = on_hosts(where, hosts) if several else where
        workers = _first_workers(given, hosts) if several else given.get("num_proc")
        job = _plan(where, workers, command, cores, environment, frozenset(names))
    variables = _variables(flags, environment)
    job = replace(job, environment={**job.environment, **variables})
    reasons = {name: flag.reason for name, flag in FLAGS.items() if flag.reason}
    reasons = reasons if elastic else reasons | dict.fromkeys(ELASTIC_ONLY, _NOT_ELASTIC)
    reasons = reasons | FOR_OTHER_HOSTS if job.is_local else reasons
    reasons = reasons | ON_SEVERAL_HOSTS if several else reasons
    useless = [name for name in given if name in reasons]
    warnings = tuple(f"{_typed(name)} has no effect in Lockstep: {reasons[name]}" for name in useless)
    folder = Path(given["output_filename"]) if "output_filename" in given else None
    output = OutputPlan(job.workers, "prefix_timestamp" in given, folder)
    if several:
        return HorovodPlan(_on_several(given, job, where, variables, environment), output, warnings)
    return HorovodPlan(_elastic(given, job, slots, environment) if elastic else job, output, warnings)


def _typed(name: str) -> str:
    """Return a flag as it is written on the command line."""
    return {"num_proc": "-np"}.get(name, f"--{name.replace('_', '-')}")


def _hosts(given: Mapping[str, Any]) -> Sequence[Host]:
    """Return the hosts of -H or --hostfile; empty without either."""
    sources = [name for name in ("hosts", "hostfile", "host_discovery_script") if name in given]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(map(_typed, sources))} both name the hosts; remove one of them")
    if "hosts" in given:
        return parse_hosts(given["hosts"])
    if "hostfile" in given:
        return read_hostfile(Path(given["hostfile"]))
    return ()


def _where(given: Mapping[str, Any]) -> LaunchOptions:
    """Return the launch options: where the workers run, and how they are started there."""
    ssh = [f"-p {given['ssh_port']}"] if "ssh_port" in given else []
    ssh += [f"-i {shlex.quote(given['ssh_identity_file'])}"] if "ssh_identity_file" in given else []
    return LaunchOptions(
        hosts=given.get("hosts"),
        hostfile=Path(given["hostfile"]) if "hostfile" in given else None,
        ssh_option=" ".join(ssh),
        interface=",".join(given.get("network_interfaces", ())),
        start_timeout=given.get("start_timeout"),
    )


def _plan(
    where: LaunchOptions,
    workers: int | None,
    command: Sequence[str],
    cores: int,
    environment: Mapping[str, str],
    here: frozenset[str],
) -> JobPlan:
    """Plan a job of `workers` workers, which SSH starts on other hosts."""
    if workers is None:
        raise ConfigError("missing -np, the number of workers; for example -np 2")
    return plan_from(where, workers, command, environment, cores, lambda: 0, here)


def _most_workers(given: Mapping[str, Any], slots: int | None) -> int:
    """Return the known maximum number of workers of an elastic job, among which the cores are divided."""
    limits = (given.get("max_np"), slots, given.get("num_proc"), given.get("min_np"))
    return next((limit for limit in limits if limit is not None), 1)


def _elastic(given: Mapping[str, Any], job: JobPlan, slots: int | None, environment: Mapping[str, str]) -> ElasticPlan:
    minimum, initial, maximum = _bounds(given)
    script = given.get("host_discovery_script", "")
    if not script and slots is None:
        slots = initial
    if not script and slots is not None:
        _check_slots(slots, initial)
    least, most = given.get("blacklist_cooldown_range", (0.0, 0.0))[-2:]
    if not 0 <= least <= most:
        raise ConfigError(
            f"--blacklist-cooldown-range {least:g} {most:g}: must be two numbers of seconds in ascending order"
        )
    return ElasticPlan(
        initial=initial,
        minimum=minimum,
        maximum=maximum,
        timeout_seconds=_timeout(given, environment),
        reset_limit=given.get("reset_limit"),
        cooldown_seconds=(least, most),
        job=job,
        slots=slots or 0,
        discovery_script=script,
        slots_per_host=given.get("slots_per_host"),
    )


def _first_workers(given: Mapping[str, Any], hosts: Sequence[Host]) -> int:
    """Return the initial number of workers of a job over several hosts: one per slot, as in Horovod."""
    _, initial, maximum = _bounds(given)
    slots = slots_of(hosts)
    _check_slots(slots, initial)
    return min(slots, maximum or slots)


def _on_several(
    given: Mapping[str, Any],
    job: JobPlan,
    where: LaunchOptions,
    variables: Mapping[str, str],
    environment: Mapping[str, str],
) -> HostsPlan:
    minimum, _, maximum = _bounds(given)
    script, limit = given.get("host_discovery_script", ""), given.get("reset_limit", RESTARTS)
    if limit < 0:
        raise ConfigError(f"--reset-limit {limit}: must be at least 0")
    restarts = RestartOptions(
        max_restarts=limit,
        min_np=minimum,
        max_np=maximum or (WORKERS if script else slots_of(parse_hosts(where.hosts or ""))),
        host_discovery_script=script,
        elastic_timeout=_timeout(given, environment),
    )
    return HostsPlan(job, where, restarts, variables, given.get("slots_per_host"))


def _bounds(given: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Return an elastic job's minimum, initial and maximum numbers of workers."""
    minimum = given.get("min_np", given.get("num_proc"))
    if minimum is None:
        raise ConfigError("missing --min-np, the fewest workers of an elastic job; for example --min-np 1")
    initial, maximum = given.get("num_proc", minimum), given.get("max_np")
    if not 1 <= minimum <= initial <= (maximum or initial):
        raise ConfigError(
            f"--min-np {minimum}, -np {initial} and --max-np {maximum} must be at least 1 and in ascending order"
        )
    return minimum, initial, maximum


def _check_slots(slots: int, initial: int) -> None:
    if slots < initial:
        raise ConfigError(f"-np {initial}, but the hosts have {slots} slots; raise host:slots, or lower -np")


def _timeout(given: Mapping[str, Any], environment: Mapping[str, str]) -> float:
    """Return how long a job waits for enough slots, in seconds."""
    return given.get("elastic_timeout") or _seconds("HOROVOD_ELASTIC_TIMEOUT", environment) or ELASTIC_SECONDS


def _seconds(variable: str, environment: Mapping[str, str]) -> float | None:
    """Return the number of seconds in a variable; None if it is not set.

    Raises:
        ConfigError: It is not a number.
    """
    text = environment.get(variable, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise ConfigError(f"{variable}={text} is not a number of seconds") from None


def _variables(flags: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' variables. Python's output is unbuffered, so that a line is shown when it is printed."""
    variables = {
        flag.variable: flag.value_of_variable(flags[name])
        for name, flag in FLAGS.items()
        if flag.variable and flags.get(name) is not None
    }
    return variables if "PYTHONUNBUFFERED" in environment else {**variables, "PYTHONUNBUFFERED": "1"}
