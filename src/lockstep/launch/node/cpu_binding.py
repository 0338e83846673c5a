"""Choose the CPUs of each worker of a machine: `--bind cores|numa|none`.

`cores` divides the usable cores among the workers. `numa` keeps a worker and its memory on one NUMA node, whose cores
it shares with the node's other workers: the node of the worker's GPU, if that is known. The source is Linux's /sys (the
kernel's Documentation/ABI: sysfs-devices-node, sysfs-devices-system-cpu, sysfs-bus-pci). Uses only the standard
library, without Lockstep: parent_death.py runs this in a process that becomes the worker.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SYSTEM = "/sys/devices/system"


def bind_here(kind: str, local_rank: int, local_size: int) -> set[int] | None:
    """Bind this process, and its future children, to `cpus_of`; if that is impossible, print why and continue.

    Returns:
        The CPUs, or None if the process is not bound.
    """
    if kind == "none":
        return None
    reason, cpus = "this system does not support CPU binding", None
    if hasattr(os, "sched_setaffinity"):
        usable = os.sched_getaffinity(0)
        nodes, siblings = numa_nodes(), thread_siblings(usable)
        near = cpus_near_gpu(local_rank, local_size, usable) if kind == "numa" else None
        cpus = near or cpus_of(kind, local_rank, local_size, usable, nodes or [], siblings or [])
        unknown = kind == "numa" and nodes is None
        reason = f"{SYSTEM} shows no NUMA nodes" if unknown else f"{len(usable)} CPUs for {local_size} workers"
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            reason, cpus = error.strerror or "refused", None
    if cpus is None and local_rank == 0:
        print(f"lockstep: --bind {kind} has no effect: {reason}", file=sys.stderr)
    return cpus


def bind_and_say(kind: str, rank: int, local_rank: int, local_size: int) -> None:
    """Bind this process, which is or becomes a worker, and print its CPUs."""
    if cpus := bind_here(kind, local_rank, local_size):
        print(f"lockstep: worker {rank} is bound to CPUs {describe(cpus)}", file=sys.stderr, flush=True)


def cpus_of(
    kind: str,
    local_rank: int,
    local_size: int,
    usable: Collection[int],
    nodes: Sequence[Collection[int]],
    siblings: Sequence[Collection[int]],
) -> set[int] | None:
    """Return the CPUs of one of a machine's workers, or None if it is not to be bound.

    "cores": the usable cores, in the order of their NUMA nodes, are split into one block per worker; if they cannot be
    divided equally, the first workers have one core more. Hyper-threads of a core stay together, unless there are fewer
    cores than workers. With fewer CPUs than workers, none is bound.

    "numa": each worker has all usable CPUs of one node, and a node has workers in proportion to its usable CPUs. With
    fewer workers than nodes, each has a block of whole nodes. If no nodes are known, none is bound.

    Args:
        kind: "cores", "numa" or "none".
        usable: CPUs that the job may use.
        nodes: CPUs of each NUMA node; may be empty.
        siblings: CPUs of each core; a CPU in none of them is a separate core.
    """
    if kind == "none":
        return None
    if kind == "numa":
        return _of_nodes(local_rank, local_size, [found for node in nodes if (found := set(usable) & set(node))])
    if kind != "cores":
        raise ValueError(f"--bind is cores, numa or none; got {kind!r}")
    node_of = {cpu: number for number, node in enumerate(nodes) for cpu in node}
    core_of = {cpu: min(core) for core in siblings for cpu in core}
    cores: dict[tuple[int, int], set[int]] = {}
    for cpu in usable:
        core = core_of.get(cpu, cpu)
        cores.setdefault((node_of.get(core, len(nodes)), core), set()).add(cpu)
    units = [cores[core] for core in sorted(cores)]
    if len(units) < local_size:
        units = [{cpu} for unit in units for cpu in sorted(unit)]
    if len(units) < local_size:
        return None
    each, more = divmod(len(units), local_size)
    first = local_rank * each + min(local_rank, more)
    return set().union(*units[first : first + each + (local_rank < more)])


def _of_nodes(local_rank: int, local_size: int, nodes: list[set[int]]) -> set[int] | None:
    """Return the node that contains the middle of the worker's share of all CPUs; for few workers, a block of nodes."""
    if not nodes:
        return None
    if local_size < len(nodes):
        block = slice(local_rank * len(nodes) // local_size, (local_rank + 1) * len(nodes) // local_size)
        return set().union(*nodes[block])
    owners = [node for node in nodes for _ in node]
    return set(owners[(2 * local_rank + 1) * len(owners) // (2 * local_size)])


def cpus_near_gpu(
    local_rank: int,
    local_size: int,
    usable: Collection[int],
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
) -> set[int]:
    """Return the usable CPUs of the NUMA node of the GPU with the worker's local rank.

    Empty if there are fewer GPUs than workers, or if the GPU's address or node is unknown.
    """
    gpus = runpy.run_path(str(Path(__file__).with_name("gpus.py")))["visible_gpus"](root, environment)
    if local_size > len(gpus):
        return set()
    try:
        node = int((root / "sys/bus/pci/devices" / gpus[local_rank] / "numa_node").read_text())
        return set(usable) & _cpus(f"{root}/sys/devices/system/node/node{node}/cpulist")  # of node -1, an OSError
    except (OSError, ValueError):
        return set()


def numa_nodes(system: str = SYSTEM) -> list[set[int]] | None:
    """Return the CPUs of each online NUMA node that has any; None if they are unknown."""
    try:
        nodes = [_cpus(f"{system}/node/node{number}/cpulist") for number in sorted(_cpus(f"{system}/node/online"))]
    except (OSError, ValueError):
        return None
    return [node for node in nodes if node] or None


def thread_siblings(cpus: Collection[int], system: str = SYSTEM) -> list[set[int]] | None:
    """Return the CPUs of each core among `cpus`, with its hyper-threads; None if they are unknown."""
    try:
        return [_cpus(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in sorted(cpus)] or None
    except (OSError, ValueError):
        return None


def describe(cpus: Collection[int]) -> str:
    """Return CPUs in Linux's list format: {0, 1, 2, 8} is "0-2,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def _cpus(path: str) -> set[int]:
    with open(path) as file:
        text = file.read().strip()
    bounds = [part.split("-") for part in text.split(",") if part]
    return {cpu for bound in bounds for cpu in range(int(bound[0]), int(bound[-1]) + 1)}
