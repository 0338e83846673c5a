"""Options for launch and restarts, and the job plan derived from them.

The only side effect is reading files that options name.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from lockstep.config.flags import arg
from lockstep.diagnosis.idle_clock import HANG_TIMEOUT, hang_limit
from lockstep.errors import ConfigError, plural, require
from lockstep.launch.forking.python_command import PRELOAD, NotForkedError, python_command
from lockstep.launch.plan.containers import ContainerOptions, find_container
from lockstep.launch.plan.hosts import (
    Allocation,
    Host,
    are_here,
    find_allocation,
    first_slots,
    is_here,
    parse_hosts,
    read_hostfile,
    slots_of,
)
from lockstep.launch.plan.job_plan import JobPlan, Kind, ManualNode, OtherNodes, Transport, plan_job
from lockstep.launch.plan.site_profiles import find_site, with_site
from lockstep.launch.plan.worker_variables import handed_on
from lockstep.launch.staging.stage_options import ENVIRONMENT, StageOptions, cache_variables
from lockstep.world.rendezvous import HOST_SECONDS, START_TIMEOUT, WORKERS_SECONDS, start_limit

Launcher = Literal["auto", "local", "ssh", "slurm", "pbs", "lsf", "mpi"]
SYSTEMS: dict[str, Kind] = {
    "Slurm": "slurm",
    "PBS": "pbs",
    "LSF": "lsf",
    "Grid Engine": "ssh",
    "Flux": "ssh",  # for the owner of a job on the host; flux exec would log and delay the streams
}
MANUAL_SECONDS = 600.0  # for users to start the other nodes


@dataclass(frozen=True)
class LaunchOptions:
    """Where a job runs, and how its workers are started there."""

    hosts: Annotated[str | None, arg(aliases=["-H"], metavar="HOST:SLOTS,...")] = None
    """Hosts and their numbers of workers, in rank order."""
    hostfile: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with one host per line: `host slots=N` or `host:N`."""
    launcher: Launcher = "auto"
    """How to reach the hosts; auto: the batch system, else SSH."""
    python: Annotated[str, arg(metavar="PATH")] = ""
    """Python on the other hosts, or in the image. Default: the path of this one, or python3."""
    ssh_option: Annotated[str, arg(metavar="'OPTIONS'")] = ""
    """Options for ssh, srun, blaunch or mpirun, such as '-p 2222 -i KEY'."""
    interface: Annotated[str, arg(metavar="NAME,...")] = ""
    """Network interfaces. Default: those that lead to the first host."""
    start_timeout: float | None = None
    """Seconds for all hosts to connect. Default: 120, or 600 with --nodes."""
    stop_timeout: float = 30.0
    """Seconds for workers to stop after Ctrl-C or SIGTERM."""
    hang_timeout: float | None = None
    """Seconds until a job without progress ends; 0: never. Default: 300, for training."""
    bind: Literal["none", "cores", "numa"] | None = None
    """Bind workers to their own cores or NUMA nodes."""
    nodes: Annotated[int | None, arg(metavar="N")] = None
    """Number of nodes, if you start the job on each manually."""
    node_rank: Annotated[int | None, arg(metavar="K")] = None
    """With --nodes: the number of this node, from 0."""
    master_addr: Annotated[str | None, arg(metavar="HOST")] = None
    """With --nodes: name or address of the first node."""
    master_port: Annotated[int | None, arg(metavar="PORT")] = None
    """With --nodes: a free port on the first node. Default: 29500."""
    dist_url: Annotated[str | None, arg(metavar="tcp://HOST:PORT")] = None
    """Address of the first node, with --world-size and --rank."""
    world_size: Annotated[int | None, arg(metavar="N")] = None
    """With --dist-url: number of nodes."""
    rank: Annotated[int | None, arg(metavar="K")] = None
    """With --dist-url: the number of this node, from 0."""
    containers: ContainerOptions = field(default_factory=ContainerOptions)
    staging: StageOptions = field(default_factory=StageOptions)
    site: Annotated[str | None, arg(metavar="NAME|FILE|none")] = None
    """Site profile. Default: the one that matches."""
    preload: bool = True
    """Import torch in each worker, not once per host."""
    dry_run: bool = False
    """Print the commands and variables for each host and exit."""

    def __post_init__(self) -> None:
        for flag, seconds in (("--start-timeout", self.start_timeout), ("--stop-timeout", self.stop_timeout)):
            require(seconds is None or seconds > 0, flag, seconds, "above 0 seconds")
        require((self.hang_timeout or 0.0) >= 0, "--hang-timeout", self.hang_timeout, "0 or more seconds")

    @property
    def is_manual(self) -> bool:
        """Whether the user starts the job on each node."""
        return self.nodes is not None or self.dist_url is not None

    @property
    def python_of_workers(self) -> str:
        """The Python that runs Lockstep in the workers."""
        return self.python or ("python3" if self.containers.container else sys.executable)

    @property
    def names_hosts(self) -> bool:
        """Whether any option determines the hosts."""
        named = self.hosts is not None or self.hostfile is not None
        return named or self.is_manual or self.launcher != "auto"


@dataclass(frozen=True)
class JoinedNodes(LaunchOptions):
    """Options of a job whose manually started nodes have joined the first one, which is this.

    `hosts` names them all, and `master_addr` is the only address of this one at which they connect; "" for any.
    """

    others: OtherNodes | None = None


def plan_from(
    options: LaunchOptions,
    workers: int | Literal["auto"] | None,
    command: Sequence[str],
    environment: Mapping[str, str],
    cores: int,
    gpus: Callable[[], int],
    here: frozenset[str],
) -> JobPlan:
    """Return the plan that the options describe.

    Args:
        workers: The total number of workers, or that of this node if nodes are started manually. None or "auto": one
            per slot of the hosts or the allocation, or one per GPU of this machine.
        environment: The launcher's environment.
        cores: Usable cores of this machine.
        gpus: Count the GPUs of this machine.
        here: The names of this machine.

    Raises:
        ConfigError: Options contradict each other, or a file that they name cannot be read.
    """
    manual = _manual(options)
    _check(options, manual)
    if manual:
        slots = workers if isinstance(workers, int) else max(1, gpus())
        hosts: Sequence[Host] = [Host("localhost", slots)]
        transport = Transport("local", options.python)
    else:
        allocation = _allocation(options, environment, gpus)
        hosts = _hosts(options, workers, allocation, gpus)
        transport = _transport(options, hosts, allocation, here)
    staging = options.staging if options.staging.sources else None
    if container := find_container(options.containers, environment, os.getcwd()):
        mounts = (*container.mounts, *([staging.folder] if staging else []))
        transport = replace(transport, container=replace(container, mounts=mounts))
    plan = plan_job(command, hosts, transport, cores, environment, here)
    if not manual and allocation and options.hosts is None and options.hostfile is None:
        plan = replace(plan, notes=(*plan.notes, *allocation.idle(hosts)))
    default_limit = start_limit(environment) or (MANUAL_SECONDS if manual else HOST_SECONDS)
    plan = replace(
        plan,
        bind=options.bind or "none",
        interfaces=tuple(name for name in options.interface.split(",") if name),
        start_timeout=options.start_timeout or default_limit,
        stop_timeout=options.stop_timeout,
        hang_timeout=hang_limit(environment) if options.hang_timeout is None else options.hang_timeout,
        ends_hangs=bool(options.hang_timeout) or HANG_TIMEOUT in environment,
        address=(options.master_addr or "") if isinstance(options, JoinedNodes) else "",
        others=options.others if isinstance(options, JoinedNodes) else None,
        manual=manual,
        staging=staging,
    )
    if site := find_site(options.site, environment, here):
        plan = with_site(plan, site, is_bound=options.bind is not None)
    if (options.start_timeout or 0.0) > (start_limit(environment) or WORKERS_SECONDS):
        plan = replace(plan, environment={**plan.environment, START_TIMEOUT: f"{options.start_timeout:g}"})
    if not options.preload:
        plan = replace(plan, environment={**plan.environment, PRELOAD: "0"})
    if staging and ENVIRONMENT in staging.sources:
        _check_environment(plan)
        moved = {name: path for name, path in cache_variables(staging).items() if name not in environment}
        plan = replace(plan, environment={**moved, **plan.environment})
    if manual:
        note = f"node {manual.node} of {manual.nodes}, {plural(plan.workers, 'worker')} here; connecting at "
        plan = replace(plan, notes=(f"{note}{manual.address}:{manual.port}",))
    return plan


def offered_hosts(
    options: LaunchOptions, environment: Mapping[str, str], gpus: Callable[[], int], plan: JobPlan
) -> Sequence[Host]:
    """Return all hosts of the options or the allocation, with all their slots, of which the plan may use only some."""
    named = options.hosts or options.hostfile or not plan.is_local
    hosts = _hosts(options, None, _allocation(options, environment, gpus), gpus) if named else ()
    taken = [Host(node.host, node.workers) for node in plan.nodes]
    return hosts if slots_of(hosts) >= plan.workers else taken


def on_hosts(options: LaunchOptions, hosts: Sequence[Host]) -> LaunchOptions:
    """Return the options with other hosts."""
    names = [f"[{host.name}]" if ":" in host.name else host.name for host in hosts]
    named = ",".join(f"{name}:{host.slots}" for name, host in zip(names, hosts, strict=True))
    return replace(options, hosts=named, hostfile=None)


def _manual(options: LaunchOptions) -> ManualNode | None:
    """Return this node's number and the first node's address, if nodes are started manually."""
    if isinstance(options, JoinedNodes):
        return None
    if options.dist_url is not None:
        url = urlsplit(options.dist_url)
        try:
            port = url.port
        except ValueError:
            port = None
        if url.scheme != "tcp" or not url.hostname or not port:
            raise ConfigError(f"--dist-url {options.dist_url} is not of the form tcp://HOST:PORT")
        if options.nodes is not None or options.master_addr is not None or options.master_port is not None:
            raise ConfigError("--dist-url cannot be combined with --nodes, --master-addr or --master-port")
        nodes, node = options.world_size, options.rank
        if nodes is None or node is None:
            raise ConfigError("--dist-url needs --world-size (the number of nodes) and --rank (this node's, from 0)")
        return _checked(ManualNode(node, nodes, url.hostname, port), "--rank", "--world-size")
    if options.world_size is not None or options.rank is not None:
        raise ConfigError("--world-size and --rank need --dist-url tcp://HOST:PORT")
    if options.nodes is None:
        alone = ("node_rank", "master_addr", "master_port")
        given = [name for name in alone if getattr(options, name) is not None]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --nodes N --node-rank K --master-addr HOST")
        return None
    if options.node_rank is None or options.master_addr is None:
        raise ConfigError("--nodes needs --node-rank K (this node's number, from 0) and --master-addr HOST (the first)")
    port = 29500 if options.master_port is None else options.master_port
    return _checked(ManualNode(options.node_rank, options.nodes, options.master_addr, port), "--node-rank", "--nodes")


def _checked(manual: ManualNode, rank: str, size: str) -> ManualNode:
    if not 0 <= manual.node < manual.nodes:
        raise ConfigError(f"{rank} {manual.node}: must be from 0 to {manual.nodes - 1} ({size} {manual.nodes})")
    if not 0 < manual.port < 65536:
        raise ConfigError(f"{manual.port}: invalid port; use one from 1024 to 65535")
    return manual


def _check(options: LaunchOptions, manual: ManualNode | None) -> None:
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError("--hosts and --hostfile both name the hosts; remove one of them")
    if manual and (options.hosts is not None or options.hostfile is not None or options.launcher != "auto"):
        raise ConfigError("--nodes cannot be combined with -H, --hostfile or --launcher")


def _check_environment(plan: JobPlan) -> None:
    """Refuse to stage an environment that the workers would not use."""
    if plan.container:
        raise ConfigError("--stage environment: the image of --container has the environment; stage only data")
    try:
        python_command(plan.command, {**handed_on(plan.own_environment), **plan.environment})
    except NotForkedError as error:
        raise ConfigError(
            f"--stage environment needs workers that are forked from Lockstep's Python: {error}"
        ) from None


def _allocation(options: LaunchOptions, environment: Mapping[str, str], gpus: Callable[[], int]) -> Allocation | None:
    if options.launcher in ("local", "ssh", "mpi") or isinstance(options, JoinedNodes):
        return None
    found = find_allocation(environment, gpus=gpus)
    wanted = options.launcher
    if wanted != "auto" and (found is None or SYSTEMS[found.system] != wanted):
        raise ConfigError(
            f"--launcher {wanted}: not in an allocation of this system; submit the job, or use -H with --launcher ssh"
        )
    return found


def _hosts(
    options: LaunchOptions,
    workers: int | Literal["auto"] | None,
    allocation: Allocation | None,
    gpus: Callable[[], int],
) -> Sequence[Host]:
    """Return the hosts in the order of ranks, with one slot per worker."""
    if options.hosts is not None:
        hosts: Sequence[Host] = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    elif allocation:
        hosts = _spread(allocation.hosts, workers)
    else:
        return [Host("localhost", workers if isinstance(workers, int) else max(1, gpus()))]
    if not (hosts := [host for host in hosts if host.slots]):  # a login host may be listed with 0
        raise ConfigError("no host has slots; give a number above 0, as in host:2")
    return first_slots(hosts, workers) if isinstance(workers, int) else hosts


def _spread(hosts: Sequence[Host], workers: int | Literal["auto"] | None) -> Sequence[Host]:
    """Return an allocation's hosts; more workers than slots are divided evenly, because slots are not a hard limit."""
    if not isinstance(workers, int) or workers <= slots_of(hosts):
        return hosts
    each, more = divmod(workers, len(hosts))
    return [Host(host.name, each + (index < more)) for index, host in enumerate(hosts)]


def _transport(
    options: LaunchOptions, hosts: Sequence[Host], allocation: Allocation | None, here: frozenset[str]
) -> Transport:
    kind: Kind
    if options.containers.container_runtime == "pyxis":
        if allocation is None or allocation.system != "Slurm":
            raise ConfigError("--container-runtime pyxis is a part of Slurm's srun: use it in a Slurm job")
        kind = "slurm"
    elif isinstance(options, JoinedNodes):
        kind = "manual"
    elif options.launcher != "auto":
        kind = options.launcher
    elif are_here(hosts, here):
        kind = "local"
    elif allocation and {host.name for host in hosts} <= {host.name for host in allocation.hosts}:
        kind = SYSTEMS[allocation.system]
    else:
        kind = "ssh"
    elsewhere = [host.name for host in hosts if not is_here(host.name, here)]
    if kind == "local" and elsewhere:
        raise ConfigError(f"--launcher local, but {', '.join(elsewhere)} is not this machine; use --launcher ssh")
    return Transport(kind, options.python, tuple(shlex.split(options.ssh_option)), _mpirun() if kind == "mpi" else "")


def _mpirun() -> str:
    for name in ("mpiexec", "mpirun"):
        if shutil.which(name):
            return name
    raise ConfigError("--launcher mpi, but neither mpiexec nor mpirun is in PATH; load the MPI module, or use ssh")


@dataclass(frozen=True)
class RestartOptions:
    """How the job continues when a worker or a host fails, or the hosts change."""

    max_restarts: Annotated[int, arg(metavar="N")] = 0
    """Restarts after failures; only training resumes by itself."""
    min_np: Annotated[int | None, arg(metavar="M")] = None
    """Fewest workers to continue with. Default: the initial number."""
    max_np: Annotated[int | None, arg(metavar="K")] = None
    """Most workers, if hosts are added. Default: the initial number."""
    host_discovery_script: Annotated[str, arg(metavar="COMMAND")] = ""
    """Command that prints the current hosts, one host:slots per line."""
    spares: Annotated[int, arg(metavar="N")] = 0
    """Slots on unused hosts to hold ready."""
    elastic_timeout: float = 600.0
    """Seconds to wait for --min-np slots."""

    def __post_init__(self) -> None:
        require(self.max_restarts >= 0, "--max-restarts", self.max_restarts, "at least 0")
        for flag, value in (("--min-np", self.min_np), ("--max-np", self.max_np)):
            require(value is None or value >= 1, flag, value, "at least 1")
        if self.min_np and self.max_np and self.min_np > self.max_np:
            raise ConfigError(f"--min-np {self.min_np} is more than --max-np {self.max_np}")
        changes = self.max_restarts or self.max_np or self.host_discovery_script
        if self.min_np and not changes:
            raise ConfigError(f"--min-np {self.min_np} limits restarts: add --max-restarts N")
        require(self.spares >= 0, "--spares", self.spares, "at least 0")
        if self.spares and not self.max_restarts:
            raise ConfigError(f"--spares {self.spares} replace lost hosts: add --max-restarts N")
        require(self.elastic_timeout > 0, "--elastic-timeout", self.elastic_timeout, "above 0 seconds")

    @property
    def is_elastic(self) -> bool:
        """Whether the workers may have more than one generation."""
        return bool(self.max_restarts or self.min_np or self.max_np or self.host_discovery_script)

    def check(self, workers: int) -> None:
        """Check the initial number of workers.

        Raises:
            ConfigError: It is below --min-np or above --max-np.
        """
        if self.min_np and workers < self.min_np:
            raise ConfigError(f"the job starts with {workers} workers, fewer than --min-np {self.min_np}")
        if self.max_np and workers > self.max_np:
            raise ConfigError(f"the job starts with {workers} workers, more than --max-np {self.max_np}")
