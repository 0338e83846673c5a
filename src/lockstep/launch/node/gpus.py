"""Find the GPUs that are visible to a process, from Linux and the environment.

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
Uses only the standard library, without Lockstep: cpu_binding.py runs this in a process that becomes the worker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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
