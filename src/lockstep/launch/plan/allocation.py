"""Find the batch system's allocation of this process: the hosts, and the number of workers on each.

| system | hosts | job |
|---|---|---|
| Slurm | SLURM_JOB_NODELIST | SLURM_JOB_ID |
| PBS (OpenPBS, PBS Professional, Torque) | the file PBS_NODEFILE | PBS_JOBID |
| LSF | the file LSB_DJOB_HOSTFILE, else LSB_MCPU_HOSTS | LSB_JOBID |
| Cobalt | the file COBALT_NODEFILE | COBALT_JOBID |
| Grid Engine | the file PE_HOSTFILE | JOB_ID |

The facts are from sbatch(1) and Slurm's src/common/env.c, qsub(1B) and pbs_resources(7B), IBM's reference of LSF's
environment variables, and sge_pe(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.errors import ConfigError
from lockstep.files.untrusted import read_text
from lockstep.launch.plan.hosts import Host
from lockstep.world.slurm_hostlist import counts, expand

GRES = re.compile(r"(?:.*?[:=])?([0-9]{1,9})(?:\(.*\))?")  # "4", "a100:4", "a100=4"
BATCH_HOST = re.compile(r"(batch|launch|login)[-_]?[0-9]*(\..*)?")
Read = Callable[[str], str]
T = TypeVar("T")


@dataclass(frozen=True)
class Allocation:
    """A batch job: its hosts in the system's order, with one slot per worker, and the source of the slots."""

    system: str
    job: str
    hosts: tuple[Host, ...]
    reason: str = ""


def _read(path: str) -> str:
    return read_text(Path(path))


def find_allocation(environment: Mapping[str, str], read: Read = _read, gpus: int = 0) -> Allocation | None:
    """Return the allocation that `environment` describes, or None outside of one.

    A slot is for one worker. In Slurm, the slots of a node are its requested tasks, if there is more than one on some
    node; else its GPUs; else one. (One task per node is usual in jobs for torchrun, so it does not mean one worker.
    SLURM_TASKS_PER_NODE without SLURM_NTASKS counts CPUs.) In other systems, a slot is a line of the host file, or the
    number in it. But if nodes have GPUs, a slot is a GPU, unless the file has fewer slots than GPUs and more than one:
    the lines of PBS and LSF often count cores. CPUs are never counted as workers; PBS's NCPUS is ignored, because it
    often means the threads of one worker.

    Args:
        environment: The environment of a process of the job.
        read: Read a host file.
        gpus: The number of GPUs visible to this process, assumed for all nodes if the system does not provide it (PBS,
            LSF, Cobalt and Grid Engine).

    Raises:
        ConfigError: A host list or file is missing or malformed; the message names the variable and the file.
    """
    if environment.get("SLURM_JOB_NODELIST"):
        return _slurm(environment)
    for system, variable, job, hosts in (
        ("Cobalt", "COBALT_NODEFILE", "COBALT_JOBID", _lines),
        ("PBS", "PBS_NODEFILE", "PBS_JOBID", _lines),
        ("LSF", "LSB_DJOB_HOSTFILE", "LSB_JOBID", _lsf),
        ("LSF", "LSB_MCPU_HOSTS", "LSB_JOBID", _lsf),
        ("Grid Engine", "PE_HOSTFILE", "JOB_ID", _grid_engine),
    ):
        if environment.get(variable):
            listed = hosts(environment, variable, read)
            slots, reason = _workers(listed, gpus, variable)
            return Allocation(system, environment.get(job, ""), slots, reason)
    return None


def _slurm(environment: Mapping[str, str]) -> Allocation:
    names = _parsed(expand, "SLURM_JOB_NODELIST", environment)
    tasks = _slurm_tasks(environment, len(names))
    gpus = 0 if max(tasks) > 1 else _slurm_gpus(environment, len(names))
    if max(tasks) > 1:
        slots, reason = tasks, "Slurm's tasks"
    elif gpus:
        slots, reason = [gpus] * len(names), "Slurm's GPUs"
    else:
        slots, reason = [1] * len(names), "neither tasks nor GPUs requested"
    return Allocation("Slurm", environment.get("SLURM_JOB_ID", ""), _hosts(zip(names, slots, strict=True)), reason)


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


def _lines(environment: Mapping[str, str], variable: str, read: Read) -> tuple[Host, ...]:
    """Read a node file with a line per slot, or a line per node with Torque's PBS_NUM_PPN slots each."""
    hosts = _hosts((row[0], 1) for row in _table(environment[variable], variable, 1, read))
    each = environment.get("PBS_NUM_PPN", "1") if variable == "PBS_NODEFILE" else "1"
    if all(host.slots == 1 for host in hosts) and _is_count(each):
        return tuple(Host(host.name, int(each)) for host in hosts)
    return hosts


def _lsf(environment: Mapping[str, str], variable: str, read: Read) -> tuple[Host, ...]:
    """Return LSF's hosts, without the batch host on which jobs of jsrun systems (Summit, Sierra, Lassen) start.

    That host takes no workers. It comes first, with one slot, and is recognized by its name, or by CSM_ALLOCATION_ID in
    the environment. LSB_MCPU_HOSTS alternates hosts and slots.
    """
    mcpu = environment.get("LSB_MCPU_HOSTS", "")
    if variable == "LSB_DJOB_HOSTFILE":
        try:
            hosts = _hosts((row[0], 1) for row in _table(environment[variable], variable, 1, read))
        except ConfigError:
            if not mcpu:
                raise
            return _lsf(environment, "LSB_MCPU_HOSTS", read)
    else:
        fields = mcpu.split()
        pairs = list(zip(fields[::2], fields[1::2], strict=False))
        if len(fields) % 2 or not pairs or not all(_is_count(number) for _, number in pairs):
            raise ConfigError(f"LSB_MCPU_HOSTS={mcpu!r} is not of the form `host slots host slots ...`")
        hosts = _hosts((name, int(number)) for name, number in pairs)
    first = hosts[0]
    apart = "CSM_ALLOCATION_ID" in environment or BATCH_HOST.fullmatch(first.name)
    return hosts[1:] if len(hosts) > 1 and first.slots == 1 and apart else hosts


def _grid_engine(environment: Mapping[str, str], variable: str, read: Read) -> tuple[Host, ...]:
    """Read Grid Engine's lines `host slots queue processors`; a host in several queues has a line for each."""
    rows = _table(environment[variable], variable, 4, read)
    for row in rows:
        if len(row) < 2 or not _is_count(row[1]):
            raise ConfigError(f"{variable}={environment[variable]}: {' '.join(row)!r} is not `host slots queue ...`")
    return _hosts((row[0], int(row[1])) for row in rows)


def _workers(listed: tuple[Host, ...], gpus: int, variable: str) -> tuple[tuple[Host, ...], str]:
    """Return the slots of a host file, or the GPUs if it lists only nodes, or more slots than GPUs."""
    if not gpus or 1 < max(host.slots for host in listed) <= gpus:
        return listed, f"the slots of {variable}"
    return tuple(Host(host.name, gpus) for host in listed), f"{gpus} GPUs per node, as on this one"


def _table(path: str, variable: str, most: int, read: Read) -> list[list[str]]:
    """Return the fields of each line that is not blank."""
    try:
        rows = [line.split() for line in read(path).splitlines() if line.strip()]
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


def _hosts(pairs: Iterable[tuple[str, int]]) -> tuple[Host, ...]:
    """Return each host once, in the order of first occurrence, with its slots summed."""
    slots: dict[str, int] = {}
    for name, number in pairs:
        slots[name] = slots.get(name, 0) + number
    return tuple(Host(name, number) for name, number in slots.items())
