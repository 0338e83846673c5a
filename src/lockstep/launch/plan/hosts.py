"""Hosts and their slots, from -H, a host file, a discovery script's output, or the batch system's allocation.

| system | hosts | job |
|---|---|---|
| Slurm | SLURM_JOB_NODELIST | SLURM_JOB_ID |
| PBS (OpenPBS, PBS Professional, Torque) | the file PBS_NODEFILE | PBS_JOBID |
| LSF | the file LSB_DJOB_HOSTFILE, else LSB_MCPU_HOSTS | LSB_JOBID |
| Grid Engine | the file PE_HOSTFILE | JOB_ID |
| Flux | `flux getattr hostlist`, or in a task `flux job info ID R` | FLUX_JOB_ID, `flux getattr jobid` |

The facts are from sbatch(1) and Slurm's src/common/env.c, qsub(1B) and pbs_resources(7B), IBM's reference of LSF's
environment variables, sge_pe(5), and flux-environment(7).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import psutil

from lockstep.errors import ConfigError, require
from lockstep.files.untrusted import read_text
from lockstep.world.batch_job import flux_hosts
from lockstep.world.slurm_hostlist import counts, expand

# A name, or an IPv6 address, in brackets if ":N" follows it.
HOST_LINE = re.compile(
    r"(?:\[(?P<address>\S+)\]|(?P<name>[^\s:]+|(?!\[)\S*:\S*:\S*))"
    r"(?:(?::|\s+slots\s*=\s*)(?P<slots>\d{1,9}))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)
LINE_FORMS = "`host slots=N` or `host:N`"
BYTE_ORDER_MARK = "\ufeff"  # at the start of files from Windows
# Also user@host and addresses, but nothing that ssh or a shell would interpret, such as a leading dash.
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9.\-_:\[\]@]{1,255}")
GRES = re.compile(r"(?:.*?[:=])?([0-9]{1,9})(?:\(.*\))?")  # "4", "a100:4", "a100=4"
COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_"
MAX_LOOKUPS = 20  # of host names, each of which may wait seconds for a broken resolver
T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """A host and its number of slots for workers.

    Raises:
        ConfigError: The name has invalid characters.
    """

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.name):
            raise ConfigError(
                f"invalid host name {self.name[:100]!r}: use letters, digits and .-_:[]@, without a dash at the "
                f"start; fix -H, the host file or the discovery script"
            )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse "a:4,b:2"; a host without a number has one slot.

    Raises:
        ConfigError: A part is not a host.
    """
    return tuple(_host(part, 1, "-H") for part in text.split(","))


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parse lines of "host slots=N", as for mpirun, or "host:N", as for Hydra.

    A host without a number has one slot, and "#" starts a comment.

    Raises:
        ConfigError: A line is not a host, or there are no hosts.
    """
    if not (lines := _lines(text)):
        raise ConfigError(f"--hostfile contains no host; write lines of the form {LINE_FORMS}")
    return tuple(_host(line, 1, "--hostfile", LINE_FORMS) for line in lines)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a host file.

    Raises:
        ConfigError: It cannot be read, a line is not a host, or there are no hosts.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return parse_hostfile(text)


def parse_discovered(text: str, slots_per_host: int | None) -> tuple[Host, ...]:
    """Parse a discovery script's lines "host:slots", or "host" if `slots_per_host` is given.

    Raises:
        ConfigError: A line is not a host.
    """
    return tuple(_host(line, slots_per_host, "--host-discovery-script") for line in _lines(text))


def slots_of(hosts: Sequence[Host]) -> int:
    """Return the total number of slots."""
    return sum(host.slots for host in hosts)


def first_slots(hosts: Sequence[Host], workers: int) -> tuple[Host, ...]:
    """Return the first slots, in the order of hosts, without hosts that are not needed.

    Raises:
        ConfigError: There are fewer slots, or `workers` is less than 1.
    """
    require(workers >= 1, "-np", workers, "at least 1")
    slots = slots_of(hosts)
    if workers > slots:
        raise ConfigError(f"-np {workers}, but the hosts have {slots} slots; raise host:slots, or lower -np")
    taken: list[Host] = []
    for host in hosts:
        left = workers - slots_of(taken)
        if left > 0:
            taken.append(Host(host.name, min(host.slots, left)))
    return tuple(taken)


def are_here(hosts: Sequence[Host], names: Collection[str]) -> bool:
    """Whether all hosts are this machine, under any of its `names`."""
    return all(is_here(host.name, names) for host in hosts)


def is_here(name: str, names: Collection[str]) -> bool:
    """Whether a host is this machine; of names that it does not have, look up those like its own, such as node7-ib0."""
    name = name.lower().rstrip(".")
    if name in names or not any(name.startswith((f"{own}.", f"{own}-")) for own in names):
        return name in names
    return any(address in names or address.startswith("127.") for address in addresses_of(name))


@cache
def addresses_of(name: str) -> frozenset[str]:
    """Return a host's addresses; none if the name is unknown, or after too many lookups."""
    if addresses_of.cache_info().misses > MAX_LOOKUPS:
        return frozenset()
    with suppress(OSError, UnicodeError):  # UnicodeError: a part is too long
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    return frozenset()


def names_of_this_machine() -> frozenset[str]:
    """Return this machine's host names and addresses, in lower case, without a DNS lookup."""
    name = socket.gethostname().lower()
    addresses = {address.address.lower() for each in psutil.net_if_addrs().values() for address in each}
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0], *addresses})


def _host(text: str, default: int | None, flag: str, form: str = "host:slots") -> Host:
    match = HOST_LINE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"{flag}: {text.strip()!r} is not of the form {form}")
    name, slots = match["name"] or match["address"], match["slots"] or default
    if slots is None:
        raise ConfigError(f"{flag}: {name!r} has no number of slots; use host:slots or add --slots-per-host")
    return Host(name, int(slots))


def _lines(text: str) -> list[str]:
    stripped = (line.partition("#")[0].strip() for line in text.removeprefix(BYTE_ORDER_MARK).splitlines())
    return [line for line in stripped if line]


@dataclass(frozen=True)
class Allocation:
    """A batch job: its hosts in the system's order, with one slot per worker, and its other nodes, as text."""

    system: str
    hosts: tuple[Host, ...]
    others: str = ""

    def idle(self, used: Sequence[Host]) -> list[str]:
        """Return a line for nodes without a worker, and one for the other components of a Slurm job, if any."""
        left = len(self.hosts) - len(used)
        line = f"idle: {left} of {len(self.hosts)} nodes of the {self.system} job have no worker; "
        lines = [f"{line}-np {slots_of(self.hosts)} uses all"] if left else []
        fix = "start the workers with `srun --het-group`, or list all hosts with -H"
        return [*lines, f"warning: nodes of the Slurm job are not used: {self.others}; {fix}"] if self.others else lines


def find_allocation(environment: Mapping[str, str], gpus: Callable[[], int] = lambda: 0) -> Allocation | None:
    """Return the allocation that `environment` describes, or None outside of one.

    A slot is for one worker. In Slurm, the slots of a node are its requested tasks, if there is more than one on some
    node; else its GPUs; else one. (One task per node is usual in jobs for torchrun, so it does not mean one worker.
    SLURM_TASKS_PER_NODE without SLURM_NTASKS counts CPUs.) In other systems, a slot is a line of the host file, or the
    number in it. But if nodes have GPUs, a slot is a GPU, unless the file has fewer slots than GPUs and more than one:
    the lines of PBS and LSF often count cores. CPUs are never counted as workers; PBS's NCPUS is ignored, because it
    often means the threads of one worker. Flux lists only hosts: a slot is a GPU, or a host.

    Args:
        environment: The environment of a process of the job.
        gpus: Count the GPUs visible to this process, assumed for all nodes if the system does not provide it (all
            but Slurm).

    Raises:
        ConfigError: A host list or file is missing or malformed; the message names the variable and the file.
    """
    if environment.get("SLURM_JOB_NODELIST"):
        return _slurm(environment)
    for system, variable, hosts in (
        ("PBS", "PBS_NODEFILE", _node_file),
        ("LSF", "LSB_DJOB_HOSTFILE", _lsf),
        ("LSF", "LSB_MCPU_HOSTS", _lsf),
        ("Grid Engine", "PE_HOSTFILE", _grid_engine),
    ):
        if environment.get(variable):
            return Allocation(system, _workers(hosts(environment, variable), gpus()))
    try:
        listed = tuple(Host(name, 1) for name in flux_hosts(environment))
    except ValueError as error:
        raise ConfigError(f"{error}; use -H HOST:WORKERS,...") from None
    return Allocation("Flux", _workers(listed, gpus())) if listed else None


def _slurm(environment: Mapping[str, str]) -> Allocation:
    names = _parsed(expand, "SLURM_JOB_NODELIST", environment)
    tasks = _slurm_tasks(environment, len(names))
    gpus = 0 if max(tasks) > 1 else _slurm_gpus(environment, len(names))
    slots = [gpus] * len(names) if gpus else tasks
    lists = [name for name in sorted(environment) if name.startswith(COMPONENT)]  # in a heterogeneous job
    others = [name for name in lists if set(_parsed(expand, name, environment)) - set(names)]
    text = ", ".join(f"component {name.removeprefix(COMPONENT)} ({environment[name]})" for name in others)
    return Allocation("Slurm", _summed(zip(names, slots, strict=True)), text)


def _slurm_tasks(environment: Mapping[str, str], nodes: int) -> list[int]:
    """Return the requested tasks of each node; all 1 by default."""
    if "SLURM_NTASKS" in environment and "SLURM_TASKS_PER_NODE" in environment:
        tasks = _parsed(counts, "SLURM_TASKS_PER_NODE", environment)
        if len(tasks) == nodes:
            return tasks
        if "SLURM_STEP_ID" not in environment:  # srun replaces it with its step's, which may have fewer nodes
            raise ConfigError(
                f"SLURM_TASKS_PER_NODE={environment['SLURM_TASKS_PER_NODE']} has {len(tasks)} nodes, but "
                f"SLURM_JOB_NODELIST={environment['SLURM_JOB_NODELIST']} has {nodes}; use -H HOST:WORKERS,..."
            )
    if "SLURM_NTASKS_PER_NODE" in environment:
        return _parsed(counts, "SLURM_NTASKS_PER_NODE", environment)[:1] * nodes
    return [1] * nodes


def _slurm_gpus(environment: Mapping[str, str], nodes: int) -> int:
    """Return the number of GPUs per node, from the request or, with --gres, from what Slurm gave this node."""
    if environment.get("SLURM_GPUS_PER_NODE"):
        return _gres("SLURM_GPUS_PER_NODE", environment)
    here = _gres("SLURM_GPUS_ON_NODE", environment) if environment.get("SLURM_GPUS_ON_NODE") else 0
    total = _gres("SLURM_GPUS", environment) if environment.get("SLURM_GPUS") else here * nodes
    if total % nodes or (here and here * nodes != total):
        raise ConfigError(
            f"Slurm allocated {total} GPUs on {nodes} nodes without setting how many per node; "
            f"request --gpus-per-node instead of --gpus, or use -H HOST:WORKERS,..."
        )
    return total // nodes


def _gres(variable: str, environment: Mapping[str, str]) -> int:
    matches = [GRES.fullmatch(part) for part in environment[variable].split(",")]
    found = [int(match[1]) for match in matches if match]
    if len(found) < len(matches):
        raise ConfigError(f"{variable}={environment[variable]} is not a number of GPUs, such as 4 or a100:4")
    return sum(found)


def _node_file(environment: Mapping[str, str], variable: str) -> tuple[Host, ...]:
    """Read a node file with a line per slot, or a line per node with Torque's PBS_NUM_PPN slots each."""
    hosts = _summed((row[0], 1) for row in _table(environment[variable], variable, 1))
    each = environment.get("PBS_NUM_PPN", "1") if variable == "PBS_NODEFILE" else "1"
    if all(host.slots == 1 for host in hosts) and _is_count(each):
        return tuple(Host(host.name, int(each)) for host in hosts)
    return hosts


def _lsf(environment: Mapping[str, str], variable: str) -> tuple[Host, ...]:
    """Return LSF's hosts; LSB_MCPU_HOSTS alternates hosts and slots."""
    mcpu = environment.get("LSB_MCPU_HOSTS", "")
    if variable == "LSB_DJOB_HOSTFILE":
        try:
            return _summed((row[0], 1) for row in _table(environment[variable], variable, 1))
        except ConfigError:
            if not mcpu:
                raise
    fields = mcpu.split()
    pairs = list(zip(fields[::2], fields[1::2], strict=False))
    if len(fields) % 2 or not pairs or not all(_is_count(number) for _, number in pairs):
        raise ConfigError(f"LSB_MCPU_HOSTS={mcpu!r} is not of the form `host slots host slots ...`")
    return _summed((name, int(number)) for name, number in pairs)


def _grid_engine(environment: Mapping[str, str], variable: str) -> tuple[Host, ...]:
    """Read Grid Engine's lines `host slots queue processors`; a host in several queues has a line for each."""
    rows = _table(environment[variable], variable, 4)
    for row in rows:
        if len(row) < 2 or not _is_count(row[1]):
            raise ConfigError(f"{variable}={environment[variable]}: {' '.join(row)!r} is not `host slots queue ...`")
    return _summed((row[0], int(row[1])) for row in rows)


def _workers(listed: tuple[Host, ...], gpus: int) -> tuple[Host, ...]:
    """Return the slots of a host file, or the GPUs if it lists only nodes, or more slots than GPUs."""
    if not gpus or 1 < max((host.slots for host in listed), default=0) <= gpus:
        return listed
    return tuple(Host(host.name, gpus) for host in listed)


def _table(path: str, variable: str, most: int) -> list[list[str]]:
    """Return the fields, up to `most`, of each line that is not blank."""
    try:
        rows = [line.split() for line in read_text(Path(path)).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{variable}={path} cannot be read: {reason}; run this inside the job, or use -H HOST:WORKERS,..."
        ) from None
    if not rows:
        raise ConfigError(f"{variable}={path} contains no host; use -H HOST:WORKERS,...")
    for row in rows:
        if len(row) > most:
            raise ConfigError(f"{variable}={path}: {' '.join(row)!r} is not a line of a host file")
    return rows


def _parsed(parse: Callable[[str], list[T]], variable: str, environment: Mapping[str, str]) -> list[T]:
    try:
        return parse(environment[variable])
    except ValueError as error:
        raise ConfigError(f"{variable}: {error}; use -H HOST:WORKERS,...") from None


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) <= 9


def _summed(pairs: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    """Return each host with slots once, in the order of first occurrence, with its slots summed."""
    slots: dict[str, int] = {}
    for name, number in pairs:
        slots[name] = slots.get(name, 0) + number
    return tuple(Host(name, number) for name, number in slots.items() if number)
