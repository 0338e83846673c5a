"""The flags of `horovodrun`, which are those of Horovod 0.28, with their help and the workers' variables they set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config.flags import Flag

NO_EFFECT = "no effect"
KINDS = {"N": int, "S": int, "MB": int, "PORT": int, "MS": float, "X": float, "MIN MAX": float}  # other values: str
NO_MPI = "there is no MPI controller; workers communicate through Gloo and NCCL"
REASONS = {
    "autotune": "nothing is tuned while a job runs; --fusion-threshold-mb and --cycle-time-ms are fixed",
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
--gloo --mpi --jsrun | only --gloo, the default, is supported; start MPI's or jsrun's workers with its own command
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
--reset-limit N | maximum number of resets (default: 100 on several hosts)
--blacklist-cooldown-range MIN MAX | seconds until a failed slot is reused, doubled with each failure

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


def _groups() -> dict[str, tuple[HorovodFlag, ...]]:
    groups = {}
    for part in TABLE.strip().split("\n\n"):
        title, *rows = part.splitlines()
        groups[title.removeprefix("# ")] = tuple(map(_flag, rows))
    return groups


GROUPS = _groups()
"""The flags by the titles of their groups."""
FLAGS = {flag.name: flag for flags in GROUPS.values() for flag in flags}
"""All flags by the keys of their values."""
