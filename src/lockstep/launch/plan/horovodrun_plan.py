"""`horovodrun`'s flags, which are those of Horovod 0.28, and the job plan, output and warnings that they describe.

The only side effect is reading files that flags name.

The names of flags and variables are those of Horovod 0.28. A flag's key is its long name with underscores; a value of
None, or a missing key, means that it was not given.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lockstep.config.flags import Flag
from lockstep.diagnosis import NODE
from lockstep.errors import ConfigError, require
from lockstep.launch.output import OutputPlan
from lockstep.launch.plan.containers import ContainerOptions, RuntimeName
from lockstep.launch.plan.hosts import Host, parse_hosts, read_hostfile, slots_of
from lockstep.launch.plan.job_plan import JobPlan
from lockstep.launch.plan.options import LaunchOptions, RestartOptions, on_hosts, plan_from
from lockstep.launch.staging.stage_options import StageOptions

NO_EFFECT = "no effect"
KINDS = {"N": int, "S": int, "MB": int, "PORT": int, "MS": float, "X": float, "MIN MAX": float}  # other values: str
NO_MPI = "there is no MPI controller; workers communicate through Gloo and NCCL"
REASONS = {
    "autotune": "nothing is tuned while a job runs; --fusion-threshold-mb and --cycle-time-ms are fixed",
    "blacklist": "a lost worker is replaced at once, and a lost host is used again as soon as it is reachable",
    "between jobs": "nothing is cached between jobs",
    "cache": "the engine negotiates in one small collective, without a response cache",
    "mpi": NO_MPI,
    "stream": "each process set uses one NCCL stream",
    "thread": "the engine's thread is not pinned; `taskset` or `numactl` pins workers",
    "timestamps": "the engine's messages have no timestamps",
    "topology": "Gloo and NCCL choose the topology",
}

# Names and metavar | help, or "no effect" with one of REASONS | variable. Names after "/" turn a switch off.
TABLE = """
# Job
-h --help | print the usual flags and exit
--help-all | print all flags and exit
-np --num-proc N | number of workers
-v --version | print the version and exit
-cb --check-build | print the available frameworks and backends and exit
--verbose | print the plan of the job first
--config-file YAML | file with flags; the command line takes precedence
--output-filename DIR | also write DIR/rank.N/stdout and DIR/rank.N/stderr
-prefix-timestamp --prefix-timestamp --prefix-output-with-timestamp | prefix each line of output with the time
--start-timeout S | seconds for all hosts to connect (default: 120) | HOROVOD_START_TIMEOUT
--disable-cache | no effect: between jobs

# Hosts and network
-H --hosts HOST:SLOTS,... | hosts and their numbers of workers
-hostfile --hostfile FILE | file with one host per line: `host slots=N` or `host:N`
-p --ssh-port PORT | SSH port of the other hosts
-i --ssh-identity-file FILE | SSH key
--network-interfaces --network-interface A,B | network interfaces to use; may be repeated
--site NAME|FILE|none | site profile, which Horovod does not have (default: the one that matches)
--container IMAGE | image for the workers, which Horovod does not have either
--container-runtime NAME | the container's runtime (default: the first that is installed)
--bind-mount PATH[:INSIDE],... | paths for the workers in the image besides the current folder
--stage environment|PATH | shared files to copy to each host's disk, which Horovod does not do
--stage-dir DIR | folder on each host for the copies (default: TMPDIR, or /tmp)
--gloo --mpi --jsrun | only --gloo, the default, is supported; MPI's own command can start the workers
--mpi-args ARGS | no effect: mpi
--tcp | disable InfiniBand in NCCL | NCCL_IB_DISABLE
--binding-args ARGS | no effect: mpi
--mpi-threads-disable / --no-mpi-threads-disable | no effect: mpi | HOROVOD_MPI_THREADS_DISABLE

# Tuning
--fusion-threshold-mb MB | largest size of fused tensors | HOROVOD_FUSION_THRESHOLD
--cycle-time-ms MS | time to wait for more tensors to fuse | HOROVOD_CYCLE_TIME
--cache-capacity N | no effect: cache | HOROVOD_CACHE_CAPACITY
--hierarchical-allreduce / --no-hierarchical-allreduce | no effect: topology | HOROVOD_HIERARCHICAL_ALLREDUCE
--hierarchical-allgather / --no-hierarchical-allgather | no effect: topology | HOROVOD_HIERARCHICAL_ALLGATHER
--torus-allreduce / --no-torus-allreduce | no effect: topology | HOROVOD_TORUS_ALLREDUCE
--autotune / --no-autotune | no effect: autotune | HOROVOD_AUTOTUNE
--autotune-log-file FILE | no effect: autotune | HOROVOD_AUTOTUNE_LOG
--autotune-warmup-samples N | no effect: autotune | HOROVOD_AUTOTUNE_WARMUP_SAMPLES
--autotune-steps-per-sample N | no effect: autotune | HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
--autotune-bayes-opt-max-samples N | no effect: autotune | HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES
--autotune-gaussian-process-noise X | no effect: autotune | HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE
--num-nccl-streams N | no effect: stream | HOROVOD_NUM_NCCL_STREAMS
--thread-affinity CORES | no effect: thread | HOROVOD_THREAD_AFFINITY
--gloo-timeout-seconds S | seconds for Gloo to connect (default: 30) | HOROVOD_GLOO_TIMEOUT_SECONDS

# Elastic jobs
--min-np --min-num-proc N | fewest workers to continue with
--max-np --max-num-proc N | most workers to use
--slots-per-host N | slots of discovered hosts without a number
--host-discovery-script FILE | command that prints the current hosts, one host:slots per line
--elastic-timeout S | seconds to wait for enough workers (default: 600) | HOROVOD_ELASTIC_TIMEOUT
--reset-limit N | maximum number of resets (default: 100)
--blacklist-cooldown-range MIN MAX | no effect: blacklist

# Timeline, stalls and log
--timeline-filename FILE | write a Chrome trace of all collectives | HOROVOD_TIMELINE
--timeline-mark-cycles / --no-timeline-mark-cycles | mark cycles in the timeline | HOROVOD_TIMELINE_MARK_CYCLES
--no-stall-check / --stall-check | do not report stalled tensors; --stall-check overrides --config-file | HOROVOD_STALL_CHECK_DISABLE
--stall-check-warning-time-seconds S | seconds until a stall is reported (default: 60) | HOROVOD_STALL_CHECK_TIME_SECONDS
--stall-check-shutdown-time-seconds S | seconds until a stall ends the job (default: 0, never) | HOROVOD_STALL_SHUTDOWN_TIME_SECONDS
--log-level {TRACE,DEBUG,INFO,WARNING,ERROR,FATAL} | log level | HOROVOD_LOG_LEVEL
--log-without-timestamp --log-hide-timestamp / --log-with-timestamp --no-log-hide-timestamp | no effect: timestamps | HOROVOD_LOG_HIDE_TIME
"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class HorovodFlag(Flag):
    """A flag of `horovodrun`. Its value is None if it is not given."""

    variable: str
    """The worker's variable that the flag sets; "" if it sets none."""
    reason: str
    """Why the flag has no effect; "" if it has one."""

    @property
    def name(self) -> str:
        """The key of the value: the first long name with underscores."""
        return self.path[0]

    def value_of_variable(self, value: Any) -> str:
        """Return a value as the worker's variable contains it."""
        if self.name == "fusion_threshold_mb":
            return str(value << 20)  # bytes
        return f"{value:g}" if isinstance(value, float) else str(int(value) if self.is_switch else value)


def _flag(row: str) -> HorovodFlag:
    names, text, variable = (*map(str.strip, row.split(" | ")), "")[:3]
    on, off = (part.split() for part in (*names.split(" / "), "")[:2])
    named = [word for word in on if word.startswith("-")]
    metavar = " ".join(word for word in on if not word.startswith("-"))
    text, _, reason = text.partition(": ") if text.startswith(NO_EFFECT) else (text, "", "")
    name = next(word for word in named if word.startswith("--")).removeprefix("--").replace("-", "_")
    switches: dict[str, Any] = {} if metavar else {**dict.fromkeys(named, True), **dict.fromkeys(off, False)}
    if name == "gloo":
        name, switches = "controller", {word: word.removeprefix("--") for word in named}
    return HorovodFlag(
        group=HorovodFlag,
        path=(name,),
        names=tuple(named),
        metavar=metavar,
        kinds=(Literal[tuple(metavar.strip("{}").split(","))] if "{" in metavar else KINDS.get(metavar, str),),
        is_many=metavar in ("A,B", "MIN MAX"),
        default=None,
        switches=switches,
        count=len(metavar.split()),
        text=text,
        variable=variable,
        reason=REASONS[reason] if reason else "",
    )


GROUPS = {
    title.removeprefix("# "): tuple(map(_flag, rows))
    for title, *rows in map(str.splitlines, TABLE.strip().split("\n\n"))
}
"""The flags by the titles of their groups."""
FLAGS = {flag.name: flag for flags in GROUPS.values() for flag in flags}
"""All flags by the keys of their values."""

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
ELASTIC_ONLY = ("slots_per_host", "elastic_timeout", "reset_limit")
REFUSED = {
    "mpi": f"{NO_MPI}. Remove --mpi, or start the workers with `mpirun -np N python script.py`, which is supported",
    "jsrun": f"jsrun is not used: {NO_MPI}. Remove --jsrun",
}


@dataclass(frozen=True)
class HorovodPlan:
    """What `horovodrun` executes: print `warnings`, then start `job` and show its output as in `output`.

    Args:
        job: The plan of the workers or, if they are elastic, of their first generation.
        where: The hosts, and how to reach them.
        variables: The variables that the flags set, for all workers of each generation.
        restarts: The limits for restarts and for the number of workers of an elastic job; None for others.
        slots_per_host: Slots of a discovery script's hosts without a number.
    """

    job: JobPlan
    output: OutputPlan
    warnings: tuple[str, ...]
    where: LaunchOptions
    variables: Mapping[str, str]
    restarts: RestartOptions | None = None
    slots_per_host: int | None = None


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
    where = _where(given)
    where = on_hosts(where, hosts) if hosts else where
    workers, restarts = _elastic(given, hosts, environment) if elastic else (given.get("num_proc"), None)
    if workers is None:
        raise ConfigError("missing -np, the number of workers; for example -np 2")
    job = plan_from(where, workers, command, environment, cores, lambda: 0, frozenset(names))
    variables = _variables(flags, environment) | {NODE: ""} | ({"HOROVOD_ELASTIC": "1"} if elastic else {})
    job = replace(job, environment={**job.environment, **variables})
    reasons = {name: flag.reason for name, flag in FLAGS.items() if flag.reason}
    reasons = reasons if elastic else reasons | dict.fromkeys(ELASTIC_ONLY, _NOT_ELASTIC)
    reasons = reasons | FOR_OTHER_HOSTS if job.is_local else reasons
    useless = [name for name in given if name in reasons]
    warnings = tuple(f"{_typed(name)} has no effect in Lockstep: {reasons[name]}" for name in useless)
    folder = Path(given["output_filename"]) if "output_filename" in given else None
    output = OutputPlan(job.workers, "prefix_timestamp" in given, folder)
    return HorovodPlan(job, output, warnings, where, variables, restarts, given.get("slots_per_host"))


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
        site=given.get("site"),
        containers=_containers(given),
        staging=StageOptions(given.get("stage", ""), given.get("stage_dir", "")),
    )


def _containers(given: Mapping[str, Any]) -> ContainerOptions:
    runtime = given.get("container_runtime")
    if runtime and runtime not in (names := get_args(RuntimeName)):
        raise ConfigError(f"--container-runtime {runtime}: must be one of {', '.join(names)}")
    return ContainerOptions(given.get("container", ""), runtime, given.get("bind_mount", ""))


def _elastic(
    given: Mapping[str, Any], hosts: Sequence[Host], environment: Mapping[str, str]
) -> tuple[int, RestartOptions]:
    """Return an elastic job's initial number of workers, one per slot of its hosts as in Horovod, and its limits."""
    minimum = given.get("min_np", given.get("num_proc"))
    if minimum is None:
        raise ConfigError("missing --min-np, the fewest workers of an elastic job; for example --min-np 1")
    initial, maximum = given.get("num_proc", minimum), given.get("max_np")
    if not 1 <= minimum <= initial <= (maximum or initial):
        raise ConfigError(
            f"--min-np {minimum}, -np {initial} and --max-np {maximum} must be at least 1 and in ascending order"
        )
    slots = slots_of(hosts) if hosts else initial
    if slots < initial:
        raise ConfigError(f"-np {initial}, but the hosts have {slots} slots; raise host:slots, or lower -np")
    workers = min(slots, maximum or slots)
    script, limit = given.get("host_discovery_script", ""), given.get("reset_limit", RESTARTS)
    require(limit >= 0, "--reset-limit", limit, "at least 0")
    return workers, RestartOptions(
        max_restarts=limit,
        min_np=minimum,
        max_np=maximum or (WORKERS if script else workers),
        host_discovery_script=script,
        elastic_timeout=_timeout(given, environment),
    )


def _timeout(given: Mapping[str, Any], environment: Mapping[str, str]) -> float:
    """Return how long a job waits for enough slots, in seconds.

    Raises:
        ConfigError: The variable is not a number.
    """
    text = environment.get("HOROVOD_ELASTIC_TIMEOUT", "")
    try:
        return given.get("elastic_timeout") or float(text or 0.0) or ELASTIC_SECONDS
    except ValueError:
        raise ConfigError(f"HOROVOD_ELASTIC_TIMEOUT={text} is not a number of seconds") from None


def _variables(flags: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' variables. Python's output is unbuffered, so that a line is shown when it is printed."""
    variables = {
        flag.variable: flag.value_of_variable(flags[name])
        for name, flag in FLAGS.items()
        if flag.variable and flags.get(name) is not None
    }
    return variables if "PYTHONUNBUFFERED" in environment else {**variables, "PYTHONUNBUFFERED": "1"}
