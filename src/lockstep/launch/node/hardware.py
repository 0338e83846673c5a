"""A machine's GPUs that are visible to a process, and the CPUs of each of its workers, from Linux and the environment.

| | one GPU | in the order of | hidden by |
|---|---|---|---|
| NVIDIA | /dev/nvidia0, ...; address: /proc/driver/nvidia/gpus/ADDRESS | PCI addresses | CUDA_VISIBLE_DEVICES |
| AMD | a readable KFD node with `simd_count` above 0 | KFD nodes | ROCR_VISIBLE_DEVICES, then HIP_ or CUDA_... |
| Intel | a render node of i915 or xe that is not integrated | PCI addresses | ZE_AFFINITY_MASK |

The first row with any GPU is used, because torch is built for one kind. The order is the default of each runtime;
CUDA's is "fastest first", which for equal GPUs is that of PCI_BUS_ID. A container's /dev has only its GPUs, and the
kernel lets it read no other KFD nodes; a privileged container has those of the host. WSL2 has only /dev/dxg, which
shows neither number nor kind: there the entries of CUDA_VISIBLE_DEVICES count. With MIG, each part in
CUDA_VISIBLE_DEVICES is a GPU.

Sources: CUDA C programming guide, "Environment Variables"; ROCm, "GPU isolation techniques", and rocdevice.cpp of its
clr; the kernel's kfd_topology.c; Level Zero's core guide, "Affinity Mask", and parseAffinityMask of compute-runtime.

CPUs are bound by `--bind cores|numa|none`, or by a site profile's lists. `cores` divides the usable cores among the
workers. `numa` keeps a worker and its memory on one NUMA node, whose cores it shares with the node's other workers: the
node of the worker's GPU, if that is known. The source is Linux's /sys (the kernel's Documentation/ABI: sysfs-devices-
node, sysfs-devices-system-cpu, sysfs-bus-pci).

Uses only the standard library, without Lockstep: parent_death.py runs this in a process that becomes the worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SYSTEM = "/sys/devices/system"
INTEGRATED = "0000:00:02."  # address of the integrated graphics of Intel's processors, which share the host's memory
UNKNOWN = ""  # an unknown address
MOST = 64  # limit for a machine that does not list its GPUs


def count_gpus() -> int:
    """Return the number of GPUs visible to this process."""
    return len(visible_gpus())


def visible_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the PCI address of each visible GPU, such as 0000:c1:00.0, in the runtime's order.

    An unknown address, such as that of a GPU that the environment names by its UUID, is "".
    """
    cuda = environment.get("CUDA_VISIBLE_DEVICES")
    if nvidia := _nvidia(root, has_limits="SLURM_JOB_ID" in environment):
        return _chosen(nvidia, cuda)
    if amd := _amd(root):
        within = _chosen(amd, environment.get("ROCR_VISIBLE_DEVICES"))
        return _chosen(within, environment.get("HIP_VISIBLE_DEVICES") or cuda)
    if intel := _intel(root, environment):
        return intel
    return _chosen([UNKNOWN] * MOST, cuda) if cuda is not None and (root / "dev/dxg").exists() else []


def _chosen(gpus: list[str], visible: str | None) -> list[str]:
    """Return the GPUs in a list of indices or UUIDs, in its order.

    Like CUDA and HIP, stop at the first unknown name, such as -1. UUIDs are assumed to be known.
    """
    if visible is None:
        return gpus
    chosen: dict[str, str] = {}
    for name in map(str.strip, visible.split(",")):
        if name.isdecimal() and int(name) < len(gpus):
            chosen[name] = gpus[int(name)]
        elif name.startswith(("GPU-", "MIG-")):
            chosen[name] = UNKNOWN
        else:
            break
    return list(chosen.values())


def _nvidia(root: Path, has_limits: bool) -> list[str]:
    """Return GPUs by PCI address, or in the order of the device files if the driver's list is incomplete.

    Args:
        has_limits: Leave out device files that cannot be opened: Slurm's ConstrainDevices shows all of them, and CUDA
            numbers those that the job may use. (Opening one can take a second if no process uses the GPU.)
    """
    files = [path for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()]
    found = {int(path.name[6:]): UNKNOWN for path in files if not has_limits or _can_open(path)}
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        minor = _fields(path, ":").get("Device Minor", "")
        if minor.isdecimal() and int(minor) in found:
            found[int(minor)] = path.parent.name
    addresses = [found[minor] for minor in sorted(found)]
    return addresses if UNKNOWN in addresses else sorted(addresses)


def _can_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except PermissionError:
        return False
    except OSError:  # such as a GPU that is broken, which CUDA numbers
        pass
    return True


def _amd(root: Path) -> list[str]:
    gpus = {}
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        node = {name: int(value) for name, value in _fields(path).items() if value.isdecimal()}
        if node.get("simd_count"):
            at = node.get("location_id", 0)  # bus, device and function; the upper bits are the number of a partition
            address = f"{node.get('domain', 0):04x}:{at >> 8 & 0xFF:02x}:{at >> 3 & 0x1F:02x}.{at & 7}"
            gpus[int(path.parent.name)] = address
    return [gpus[number] for number in sorted(gpus)]


def _intel(root: Path, environment: Mapping[str, str]) -> list[str]:
    """Return GPUs by PCI address, in any mask's order; a tile is a GPU unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE."""
    is_flat = environment.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() != "COMPOSITE"
    gpus = []
    for render in (root / "sys/class/drm").glob("renderD*"):
        device, is_here = (render / "device").resolve(), (root / "dev/dri" / render.name).exists()
        is_intel = (device / "driver").resolve().name in ("i915", "xe")
        if is_here and is_intel and not device.name.startswith(INTEGRATED):
            tiles = [*device.glob("tile[0-9]*"), *device.glob("drm/card*/gt/gt[0-9]*")]  # xe's, i915's
            gpus += [device.name] * (max(1, len(tiles)) if is_flat else 1)
    gpus.sort()
    mask = environment.get("ZE_AFFINITY_MASK")
    if not mask:
        return gpus
    # If tiles are devices, CARD.TILE is ignored; if cards are, it selects a card with only this tile.
    names = [name.strip() for name in mask.split(",")]
    named = {name if is_flat else name.partition(".")[0] for name in names}
    return [gpu for index, gpu in enumerate(gpus) if str(index) in named]


def _fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """Return the lines `name value` of a file; empty if it cannot be read."""
    try:
        lines = [line.split(separator, 1) for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {pair[0].strip(): pair[1].strip() for pair in lines if len(pair) == 2}


def bind_worker(kind: str, environment: Mapping[str, str]) -> None:
    """Bind this process, which is or becomes a worker, to `cpus_of`, and print its CPUs, or why it is not bound.

    Args:
        kind: "cores", "numa", "none", or "list:" and the CPUs of each local rank, separated by colons.
        environment: The worker's variables.
    """
    if kind == "none":
        return
    rank, local_rank, local_size = (
        int(environment[f"HOROVOD_{name}"]) for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE")
    )
    reason, cpus = "this system does not support CPU binding", None
    if hasattr(os, "sched_setaffinity"):
        usable = os.sched_getaffinity(0)
        nodes, siblings = numa_nodes(), thread_siblings(usable)
        near = cpus_near_gpu(local_rank, local_size, usable) if kind == "numa" else None
        if kind.startswith("list:"):
            near = listed_cpus(kind, local_rank) & usable
            if not near:
                print(f"lockstep: worker {rank} is not bound: its CPUs in {kind} are not usable here", file=sys.stderr)
                return
        cpus = near or cpus_of(kind, local_rank, local_size, usable, nodes or [], siblings or [])
        unknown = kind == "numa" and nodes is None
        reason = f"{SYSTEM} shows no NUMA nodes" if unknown else f"{len(usable)} CPUs for {local_size} workers"
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            reason, cpus = error.strerror or "refused", None
    if cpus:
        print(f"lockstep: worker {rank} is bound to CPUs {describe(cpus)}", file=sys.stderr, flush=True)
    elif local_rank == 0:
        print(f"lockstep: --bind {kind} has no effect: {reason}", file=sys.stderr)


def listed_cpus(kind: str, local_rank: int) -> set[int]:
    """Return the CPUs of a local rank in a list such as "list:0-7,64:8-15,72"; none if the list is shorter."""
    lists = kind.split(":")[1:]
    return parse_cpus(lists[local_rank]) if local_rank < len(lists) else set()


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
        usable: CPUs that the job may use.
        nodes: CPUs of each NUMA node; may be empty.
        siblings: CPUs of each core; a CPU in none of them is a separate core.
    """
    if kind == "numa":
        return _of_nodes(local_rank, local_size, [found for node in nodes if (found := set(usable) & set(node))])
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
    gpus = visible_gpus(root, environment)
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
        return parse_cpus(file.read().strip())


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs of a text in Linux's list format."""
    bounds = [part.split("-") for part in text.split(",") if part]
    return {cpu for bound in bounds for cpu in range(int(bound[0]), int(bound[-1]) + 1)}
