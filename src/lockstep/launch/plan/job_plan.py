"""The plan of a job: its command, hosts, numbers of workers and variables. Nothing is started here."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.diagnosis import FOLDER as PROGRESS
from lockstep.errors import ConfigError, plural, require
from lockstep.launch.plan.hosts import Host
from lockstep.launch.plan.timings import Timings
from lockstep.launch.plan.transports import Transport, start_command
from lockstep.world.accelerator import VISIBLE
from lockstep.world.group_watch import HANG_SECONDS
from lockstep.world.store import HOST_SECONDS

LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Variables that Horovod scripts may read, the same for all workers of a job.
HOROVOD_VARIABLES = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
RANK_INFO = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "LOCKSTEP_SNAPSHOTS"),
    *(f"HOROVOD_{part}{what}" for part in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")),
)
# If set, manually started nodes identify each other by this secret; for other jobs the launcher chooses one.
SECRET = "LOCKSTEP_JOB_SECRET"
# Variables that describe one host or a session on it, and would be wrong on other hosts.
OF_THE_HOST = (
    *("HOME", "HOSTNAME", "LOGNAME", "MAIL", "PWD", "OLDPWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"),
    *("DISPLAY", "_"),
    *VISIBLE,
    *("GPU_DEVICE_ORDINAL", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SLURMD_NODENAME", "SLURM_TASK_PID"),
)
OF_THE_SESSION = ("BASH_FUNC_", "SSH_", "XDG_", "DBUS_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")


@dataclass(frozen=True)
class NodePlan:
    """One host's part of a job: its number of workers, and the command that starts Lockstep's node process there."""

    host: str
    workers: int
    start: tuple[str, ...]
    is_here: bool = True


@dataclass(frozen=True)
class ManualNode:
    """This launcher's host in a job whose nodes are started manually.

    It is `node` of `nodes`; the others connect to the first one at `address`:`port`.
    """

    node: int
    nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class JobPlan:
    """A job: one command, started once per worker on each node, in the order of ranks.

    Args:
        environment: Variables of all workers, added to what each host's node process receives.
        notes: Lines to print before the job starts.
        bind: How workers are bound to cores: cores, numa or none.
        interfaces: The only network interfaces to use; if empty, the one towards the first host.
        start_timeout: Seconds within which all hosts must answer. Importing torch has a separate limit.
        stop_timeout: Seconds from a request to stop until the workers are killed.
        hang_timeout: Seconds without progress until the workers are examined; 0: never.
        ends_hangs: Whether to end any job that hangs; otherwise only Lockstep's own training is ended.
        snapshots: The folder in each host's memory that outlives the workers, or "".
        newcomers: Hosts that were not part of the previous start; snapshots in their memory are obsolete.
        restart: How often the workers have been restarted, of `max_restarts` times.
    """

    command: tuple[str, ...]
    nodes: tuple[NodePlan, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    bind: str = "none"
    interfaces: tuple[str, ...] = ()
    start_timeout: float = HOST_SECONDS
    stop_timeout: float = 30.0
    hang_timeout: float = HANG_SECONDS
    ends_hangs: bool = False
    manual: ManualNode | None = None
    snapshots: str = ""
    newcomers: tuple[str, ...] = ()
    restart: int = 0
    max_restarts: int = 0
    timings: Timings = field(default_factory=Timings, repr=False)
    own_environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def workers(self) -> int:
        return sum(node.workers for node in self.nodes)

    @property
    def is_local(self) -> bool:
        """Whether the job runs only on this machine, and so uses the loopback interface."""
        return self.manual is None and all(node.is_here for node in self.nodes)

    def first_rank(self, index: int) -> int:
        """Return the rank of the first worker of a node."""
        return sum(node.workers for node in self.nodes[:index])


def plan_local(workers: int, command: Sequence[str], cores: int, environment: Mapping[str, str]) -> JobPlan:
    """Plan a job of `workers` processes on this machine, which has `cores` usable cores.

    Raises:
        ConfigError: `workers` is not positive.
    """
    return plan_job(command, [Host("localhost", workers)], Transport("local"), cores, environment)


def plan_job(
    command: Sequence[str],
    hosts: Sequence[Host],
    transport: Transport,
    cores: int,
    environment: Mapping[str, str],
    here: frozenset[str] = frozenset({"localhost"}),
) -> JobPlan:
    """Plan a job with as many workers on each host as it has slots.

    Args:
        cores: Usable cores of this machine; other hosts count theirs.
        environment: The launcher's environment.
        here: The names of this machine.

    Raises:
        ConfigError: A number of workers is not positive, or a host is listed twice.
    """
    for host in hosts:
        require(host.slots >= 1, "-np", host.slots, "at least 1")
    if all(host.name.lower() in here for host in hosts):
        hosts = [Host(hosts[0].name, sum(host.slots for host in hosts))]
    _check_once([host.name for host in hosts], here)
    nodes = []
    for host in hosts:
        is_here = host.name.lower() in here
        nodes.append(NodePlan(host.name, host.slots, start_command(transport, host.name, is_here), is_here))
    variables = dict(HOROVOD_VARIABLES)
    plan = JobPlan(tuple(command), tuple(nodes), variables, own_environment=dict(environment))
    notes = [_note(plan, cores, environment)]
    if plan.is_local:
        variables |= {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE}
        variables |= {"HOROVOD_HOSTNAME": plan.nodes[0].host, "HOROVOD_GLOO_IFACE": LOOPBACK_INTERFACE}
        if "OMP_NUM_THREADS" not in environment:
            variables["OMP_NUM_THREADS"] = str(threads(cores, plan.workers))
        if plan.workers > cores:
            notes.append(crowding(plan.workers, cores))
    return JobPlan(plan.command, plan.nodes, variables, tuple(notes), own_environment=plan.own_environment)


def _check_once(names: Sequence[str], here: frozenset[str]) -> None:
    """Refuse a host that is listed twice, also under two names of this machine."""
    seen: dict[str, str] = {}
    for name in names:
        machine = "" if name.lower() in here else name.lower()
        if machine in seen:
            which = f"{name} is" if machine or seen[""] == name else f"{seen[machine]} and {name} are this machine,"
            raise ConfigError(f"{which} listed twice among the hosts; list it once, with all its slots")
        seen[machine] = name


def threads(cores: int, workers: int) -> int:
    """Return the threads per worker, so that the workers of a host have no more threads than cores."""
    return max(1, cores // workers)


def crowding(workers: int, cores: int) -> str:
    """Return the warning that a host has fewer cores than workers."""
    return f"warning: {workers} workers share {plural(cores, 'core')} and will slow each other down"


def _note(plan: JobPlan, cores: int, environment: Mapping[str, str]) -> str:
    own = environment.get("OMP_NUM_THREADS")
    workers = plural(plan.workers, "worker")
    if not plan.is_local:
        where = ", ".join(f"{node.workers} on {node.host}" for node in plan.nodes)
        return f"{workers}: {where}" + (f"; {plural(own, 'thread')} each (from OMP_NUM_THREADS)" if own else "")
    each = plural(own or threads(cores, plan.workers), "thread")
    reason = "from OMP_NUM_THREADS" if own else f"{plural(cores, 'core')} / {workers}"
    return f"{workers} on this machine, {each} each ({reason})"


def torchrun_variables(
    node: int, local_rank: int, slots: Sequence[int], address: str, port: int | str
) -> dict[str, str]:
    """Return the variables in which torchrun passes rank info to a worker.

    Args:
        slots: Workers on each node.
        address: The address of the job's store, at `port`.
    """
    rank, size = str(sum(slots[:node]) + local_rank), str(sum(slots))
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(slots[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(slots)),
        "ROLE_NAME": "worker",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def horovod_variables(worker: Mapping[str, str], slots: Sequence[int]) -> dict[str, str]:
    """Return Horovod's variables for a worker with these torchrun variables.

    Args:
        slots: Workers on each node.
    """
    return {
        "HOROVOD_RANK": worker["RANK"],
        "HOROVOD_SIZE": worker["WORLD_SIZE"],
        "HOROVOD_LOCAL_RANK": worker["LOCAL_RANK"],
        "HOROVOD_LOCAL_SIZE": worker["LOCAL_WORLD_SIZE"],
        **cross_variables(int(worker["GROUP_RANK"]), int(worker["LOCAL_RANK"]), [range(count) for count in slots]),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": worker["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": worker["MASTER_PORT"],
    }


def cross_variables(node: int, local_rank: int, local_ranks: Sequence[Collection[int]]) -> dict[str, str]:
    """Return Horovod's cross rank and size, which count the nodes that have a worker with this local rank.

    Args:
        local_ranks: Of the workers on each node.
    """
    having = [index for index, own in enumerate(local_ranks) if local_rank in own]
    return {"HOROVOD_CROSS_RANK": str(having.index(node)), "HOROVOD_CROSS_SIZE": str(len(having))}


def handed_on(environment: Mapping[str, str], elsewhere: bool = False) -> dict[str, str]:
    """Return the part of the launcher's environment that its workers inherit.

    It excludes SECRET, which only the launcher needs, and PROGRESS and RANK_INFO, which are the launcher's own if it is
    a worker of another job. On this host, CUDA_VISIBLE_DEVICES and exported shell functions are inherited. (Horovod
    drops them, because other hosts have other devices and shells.)

    Args:
        elsewhere: For workers on another host, without variables that describe this host.
    """
    dropped = {"HOROVOD_ELASTIC", SECRET, PROGRESS, *RANK_INFO, *(OF_THE_HOST if elsewhere else ())}
    prefixes = OF_THE_SESSION if elsewhere else ()
    return {name: environment[name] for name in environment if not name.startswith(prefixes) and name not in dropped}
