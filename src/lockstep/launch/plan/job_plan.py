"""The plan of a job: its command, hosts, numbers of workers and variables. Nothing is started here.

A command starts Lockstep's node process on each host: directly, or through ssh, srun, blaunch or mpirun. These programs
only have to connect the node process's standard streams to the launcher's.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from lockstep.diagnosis.idle_clock import HANG_SECONDS
from lockstep.errors import ConfigError, plural, require
from lockstep.launch.forking.python_command import NotForkedError, check_program, python_command
from lockstep.launch.plan.containers import OUTSIDE, Container
from lockstep.launch.plan.hosts import Host, addresses_of, are_here, is_here
from lockstep.launch.plan.timings import Timings
from lockstep.launch.plan.worker_variables import handed_on, horovod_variables, threads, torchrun_variables
from lockstep.launch.staging.stage_options import StageOptions
from lockstep.world.interfaces import LOOPBACK, LOOPBACK_INTERFACE
from lockstep.world.rendezvous import HOST_SECONDS

if TYPE_CHECKING:
    from lockstep.launch.protocol.messages import HostProcess

Kind = Literal["local", "ssh", "slurm", "pbs", "lsf", "mpi", "manual"]
NODE_MODULE = "lockstep.launch.node"
STAGER_MODULE = "lockstep.launch.staging.stager"
IMPORTANT = ("warning:", "idle:")  # notes that are printed in any case
# Variables that Horovod scripts may read, the same for all workers of a job.
HOROVOD_VARIABLES = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
AT_START = "<chosen at the start>"
OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"),
)


@dataclass(frozen=True)
class Transport:
    """A way to start processes on other hosts.

    Args:
        python: The Python there, or in the image; empty: the same path as here, or python3.
        options: More arguments for the program, such as ssh's -p or -i.
        program: The name of mpirun; only for `mpi`.
        container: The image that they run in.
    """

    kind: Kind
    python: str = ""
    options: tuple[str, ...] = ()
    program: str = "mpirun"
    container: Container | None = None


def start_command(transport: Transport, host: str, is_here: bool, module: str = NODE_MODULE) -> tuple[str, ...]:
    """Return the command that starts the node process on a host, or another module."""
    arguments = ("-P", "-m", module)  # -P: modules in the job's folder are only for the workers
    is_direct = transport.kind == "local" or (is_here and transport.kind in DIRECT_HERE)
    if transport.container:
        node = transport.container.around((transport.python or "python3", *arguments))
    else:
        node = (sys.executable if is_direct else transport.python or sys.executable, *arguments)
    return node if is_direct else COMMANDS[transport.kind](transport, host, node)


def _ssh(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    # It never prompts, detects dead connections, and uses its own connection.
    settings = ("BatchMode=yes", "ServerAliveInterval=3", "ServerAliveCountMax=3", "ControlPath=none")
    arguments = (argument for setting in settings for argument in ("-o", setting))
    return ("ssh", "-T", *transport.options, *arguments, host, f"exec {shlex.join(node)}")


def _srun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--mem=0")
    streams = ("--unbuffered", "--quiet", "--input=0", "--kill-on-bad-exit=0")
    pyxis = transport.container if transport.container and transport.container.runtime == "pyxis" else None
    image = pyxis.slurm_options if pyxis else ()
    return (*(OUTSIDE if pyxis else ()), "srun", *step, *streams, *transport.options, *image, *node)


def _blaunch(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    return ("blaunch", *transport.options, "-z", host, *node)


def _mpirun(transport: Transport, host: str, node: tuple[str, ...]) -> tuple[str, ...]:
    # Open MPI would bind the node process, and thus all its workers, to one core; Hydra has the same flags.
    return (transport.program, "-np", "1", "-host", host, "-bind-to", "none", *transport.options, *node)


COMMANDS: dict[Kind, Callable[[Transport, str, tuple[str, ...]], tuple[str, ...]]] = {
    "ssh": _ssh,
    "pbs": _ssh,  # PBS allows the job's owner to log in by SSH; pbsdsh does not forward stdin
    "slurm": _srun,
    "lsf": _blaunch,
    "mpi": _mpirun,
    "manual": lambda transport, host, node: (),  # the host's own `lockstep` starts it
}
DIRECT_HERE = ("ssh", "pbs", "lsf", "manual")  # not used for the launcher's own host


@dataclass(frozen=True)
class NodePlan:
    """One host's part of a job: its number of workers, and the commands that start Lockstep's processes there.

    Args:
        start: Starts the node process; empty for a manually started node, whose own `lockstep` starts it.
        stager: The same for the process that copies files for `--stage`, never in a container.
    """

    host: str
    workers: int
    start: tuple[str, ...]
    is_here: bool = True
    in_container: bool = False
    stager: tuple[str, ...] = ()

    @property
    def is_relayed(self) -> bool:
        """Whether this is a manually started node, with its own environment, and not the launcher's."""
        return not self.start

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies its node process: the start command, because a host may have two names."""
        return self.start or (self.host,)

    def environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the part of the launcher's environment that the workers do not inherit but receive by message."""
        if self.is_relayed or (self.is_here and not self.in_container):
            return {}
        return handed_on(own, elsewhere=not self.is_here, into_image=self.in_container)


class OtherNodes(Protocol):
    """The other nodes of a job, if they are started manually."""

    obey: bool
    secret: str

    async def start(self, host: str, stager: bool = False) -> HostProcess: ...
    async def is_present(self, host: str, seconds: float) -> bool: ...
    def report(self, text: str) -> None: ...


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
        added: The last arguments of the command, if the launcher has added them.
        notes: Lines to print before the job starts.
        bind: How workers are bound to cores: cores, numa, none, or list:CPUS:CPUS by local rank.
        site_notes: What the site's profile added, and what takes precedence over it.
        interfaces: The only network interfaces to use; if empty, the one towards the first host.
        address: The only address of this host at which others reach it; "" for any.
        manual: This node's number and the first node's address, of a plan for one manually started node.
        others: Starts processes on the manually started nodes that have joined this one.
        start_timeout: Seconds within which all hosts must answer. Importing torch has a separate limit.
        stop_timeout: Seconds from a request to stop until the workers are killed.
        hang_timeout: Seconds without progress until the workers are examined; 0: never.
        ends_hangs: Whether to end any job that hangs; otherwise only Lockstep's own training is ended.
        snapshots: The folder in each host's memory that outlives the workers, or "".
        newcomers: Hosts that were not part of the previous generation; snapshots in their memory are obsolete.
        generation: Its number, from 0.
        container: The image that the workers run in.
        staging: What is copied to the hosts' disks first.
        terminal: The only worker, on this machine, has the launcher's terminal as its streams.
        direct_stdout: Workers on this machine write to the launcher's stdout directly, for progress bars.
        loss: When and how the previous generation of the workers ended: a Unix time, a space and a text.
    """

    command: tuple[str, ...]
    nodes: tuple[NodePlan, ...]
    environment: Mapping[str, str]
    added: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bind: str = "none"
    site_notes: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    address: str = ""
    start_timeout: float = HOST_SECONDS
    stop_timeout: float = 30.0
    hang_timeout: float = HANG_SECONDS
    ends_hangs: bool = False
    manual: ManualNode | None = None
    others: OtherNodes | None = field(default=None, repr=False)
    snapshots: str = ""
    newcomers: tuple[str, ...] = ()
    generation: int = 0
    loss: str = ""
    max_restarts: int = 0
    timings: Timings = field(default_factory=Timings, repr=False)
    own_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    container: Container | None = None
    staging: StageOptions | None = None
    terminal: bool = False
    direct_stdout: bool = False

    @property
    def is_elastic(self) -> bool:
        """Whether this may not be the job's last generation."""
        return bool(self.snapshots)

    @property
    def workers(self) -> int:
        return sum(node.workers for node in self.nodes)

    @property
    def obeys(self) -> bool:
        """Whether this manually started node runs the first one's command: in a study, and with `--stage`."""
        return not self.command or self.staging is not None

    @property
    def is_local(self) -> bool:
        """Whether the job runs only on this machine, and so uses the loopback interface."""
        return self.manual is None and all(node.is_here for node in self.nodes)

    def check_program(self) -> None:
        """Check the command as `python_command.check_program`, if this machine runs it outside containers."""
        if any(node.is_here and not node.in_container for node in self.nodes):
            check_program(self.command)


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
    if are_here(hosts, here):
        hosts = [Host(hosts[0].name, sum(host.slots for host in hosts))]
    _check_once([host.name for host in hosts], here)
    nodes = []
    for host in hosts:
        own = is_here(host.name, here)
        start = start_command(transport, host.name, own)
        outside = replace(transport, container=None, python="" if transport.container else transport.python)
        stager = start_command(outside, host.name, own, STAGER_MODULE)
        nodes.append(NodePlan(host.name, host.slots, start, own, transport.container is not None, stager))
    variables = dict(HOROVOD_VARIABLES)
    plan = JobPlan(
        tuple(command), tuple(nodes), variables, own_environment=dict(environment), container=transport.container
    )
    notes = [_note(plan, cores)]
    if plan.is_local:
        if "OMP_NUM_THREADS" not in environment:
            variables["OMP_NUM_THREADS"] = str(threads(cores, plan.workers))
        if plan.workers > cores:
            notes.append(crowding(plan.workers, cores))
    return replace(plan, notes=tuple(notes))


def _check_once(names: Sequence[str], here: frozenset[str]) -> None:
    """Refuse a host that is listed twice, also under two names; look up only names with the same first part."""
    parts = Counter(_first_part(name) for name in names)
    seen: dict[str, str] = {}
    for name in names:
        own, low, part = is_here(name, here), name.lower(), _first_part(name)
        is_alike = not own and parts[part] > 1 and not part.isdigit()  # digits: an address
        keys = {"" if own else low, *(addresses_of(low.rpartition("@")[2]) if is_alike else ())}
        for key in keys & seen.keys():
            is_same = seen[key].lower() == low
            which = f"{name} is" if is_same else f"{seen[key]} and {name} are {'this' if own else 'one'} machine,"
            raise ConfigError(f"{which} listed twice among the hosts; list it once, with all its slots")
        seen |= dict.fromkeys(keys, name)


def _first_part(name: str) -> str:
    return name.lower().rpartition("@")[2].partition(".")[0]


def crowding(workers: int, cores: int) -> str:
    """Return the warning that a host has fewer cores than workers."""
    return f"warning: {workers} workers share {plural(cores, 'core')} and will slow each other down"


def _note(plan: JobPlan, cores: int) -> str:
    own = plan.own_environment.get("OMP_NUM_THREADS")
    workers = plural(plan.workers, "worker")
    if not plan.is_local:
        where = ", ".join(f"{node.workers} on {node.host}" for node in plan.nodes)
        return f"{workers}: {where}" + (f"; {plural(own, 'thread')} each (from OMP_NUM_THREADS)" if own else "")
    each = plural(own or threads(cores, plan.workers), "thread")
    reason = "from OMP_NUM_THREADS" if own else f"{plural(cores, 'core')} / {workers}"
    return f"{workers} on this machine, {each} each ({reason})"


def describe_plan(plan: JobPlan) -> str:
    """Return, in shell syntax, each node's start command, its workers' variables, and each worker's command."""
    staging = [f"copied to {plan.staging.folder} first: {', '.join(plan.staging.sources)}"] if plan.staging else []
    lines = [f"# {note}" for note in (*plan.notes, *plan.site_notes, *staging, _how_workers_start(plan))]
    for index, node in enumerate(plan.nodes):
        number, nodes = (plan.manual.node, plan.manual.nodes) if plan.manual else (index, len(plan.nodes))
        workers = [_variables(plan, index, local_rank) for local_rank in range(node.workers)]
        common = {name: value for name, value in workers[0].items() if name not in OF_A_WORKER}
        lines += ["", f"# node {number} of {nodes}: {node.host}", shlex.join(node.start)]
        lines += [f"  export {name}={_quoted(value)}" for name, value in common.items()]
        for variables in workers:
            own = " ".join(f"{name}={_quoted(variables[name])}" for name in OF_A_WORKER)
            lines.append(f"  {own} {shlex.join(plan.command)}")
    return "\n".join(lines)


def _how_workers_start(plan: JobPlan) -> str:
    """Describe how workers start on this host; other hosts decide by their own environment."""
    try:
        program = python_command(plan.command, {**handed_on(plan.own_environment), **plan.environment})
    except NotForkedError as error:
        return f"each worker starts its own interpreter: {error}"
    return f"a host's workers are forked from one process that has imported {', '.join(program.modules)}"


def _quoted(value: str) -> str:
    return value if value.startswith("<") else shlex.quote(value)


def _variables(plan: JobPlan, index: int, local_rank: int) -> dict[str, str]:
    node, hand = plan.nodes[index], plan.manual
    if hand:
        slots = [node.workers] * hand.nodes  # an assumption
        torchrun = torchrun_variables(hand.node, local_rank, slots, hand.address, AT_START)
        torchrun |= dict.fromkeys(("RANK", "ROLE_RANK"), f"<after the {hand.node} nodes before>")
        torchrun |= dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), "<of all nodes>")
    else:
        slots = [each.workers for each in plan.nodes]
        address = LOOPBACK if plan.is_local else AT_START
        torchrun = torchrun_variables(index, local_rank, slots, address, AT_START)
    interface = LOOPBACK_INTERFACE if plan.is_local else "<towards the first host>"
    own = {"HOROVOD_HOSTNAME": node.host, "HOROVOD_GLOO_IFACE": interface, "GLOO_SOCKET_IFNAME": interface}
    only = [LOOPBACK_INTERFACE] if plan.is_local else plan.interfaces
    own["NCCL_SOCKET_IFNAME"] = f"={','.join(only)}" if only else "<that interface, if it is the only one>"
    if "OMP_NUM_THREADS" not in plan.own_environment:
        own["OMP_NUM_THREADS"] = f"<cores of {node.host} / {node.workers}>"
    return {**torchrun, **horovod_variables(torchrun, slots), **own, **plan.environment}
