"""The GPUs that a process of this machine sees, as Linux and the environment show them.

| | one GPU | in the order of | hidden by |
|---|---|---|---|
| NVIDIA | /dev/nvidia0, ...; address: /proc/driver/nvidia/gpus/ADDRESS | PCI addresses | CUDA_VISIBLE_DEVICES |
| AMD | a readable KFD node with `simd_count` above 0 | KFD nodes | ROCR_VISIBLE_DEVICES, then HIP_ or CUDA_... |
| Intel | a render node of i915 or xe that is not integrated | PCI addresses | ZE_AFFINITY_MASK |

The first row that has any counts, as torch is built for one of them. The order is each runtime's own by default; CUDA's
is "fastest first", which among equal GPUs is that of PCI_BUS_ID. A container's /dev has its GPUs alone, and the kernel
lets it read no other KFD nodes; a privileged container has the host's. WSL2 has /dev/dxg only, which says neither how
many nor whose: there CUDA_VISIBLE_DEVICES counts them. Of MIG, each part that CUDA_VISIBLE_DEVICES names is a GPU.

Sources: CUDA C programming guide, "Environment Variables"; ROCm, "GPU isolation techniques", and rocdevice.cpp of its
clr; the kernel's kfd_topology.c; Level Zero's core guide, "Affinity Mask", and parseAffinityMask of compute-runtime.
Standard library alone, and no import of Lockstep: cpu_binding.py runs this in a process that becomes the worker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

INTEGRATED = "0000:00:02."  # where Intel's processors have their own graphics, which share the host's memory
UNKNOWN = ""  # an address
MOST = 64  # GPUs of a machine that does not list them


def count_gpus() -> int:
    """How many GPUs this process sees."""
    return len(visible_gpus())


def visible_gpus(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[str]:
    """The PCI address of each GPU that a process sees, such as 0000:c1:00.0, in its runtime's order.

    A GPU whose address is not known, such as one that the environment names by its UUID, is "".
    """
    cuda = environment.get("CUDA_VISIBLE_DEVICES")
    if nvidia := _nvidia(root):
        return _chosen(nvidia, cuda)
    if amd := _amd(root):
        within = _chosen(amd, environment.get("ROCR_VISIBLE_DEVICES"))
        return _chosen(within, environment.get("HIP_VISIBLE_DEVICES") or cuda)
    if intel := _intel(root, environment):
        return intel
    return _chosen([UNKNOWN] * MOST, cuda) if cuda is not None and (root / "dev/dxg").exists() else []


def _chosen(gpus: list[str], visible: str | None) -> list[str]:
    """The GPUs that a list of indices or UUIDs names, in its order.

    CUDA and HIP stop at the first name that they do not know, such as -1. That a UUID is known is taken for granted.
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


def _nvidia(root: Path) -> list[str]:
    """By PCI address; in the order of the device files where the driver's list has not all of them."""
    found = {int(path.name[6:]): UNKNOWN for path in (root / "dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()}
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        minor = _fields(path, ":").get("Device Minor", "")
        if minor.isdecimal() and int(minor) in found:
            found[int(minor)] = path.parent.name
    addresses = [found[minor] for minor in sorted(found)]
    return addresses if UNKNOWN in addresses else sorted(addresses)


def _amd(root: Path) -> list[str]:
    gpus = {}
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        node = {name: int(value) for name, value in _fields(path).items() if value.isdecimal()}
        if node.get("simd_count"):
            place = node.get("location_id", 0)  # bus, device and function; above them the number of a partition
            address = f"{node.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            gpus[int(path.parent.name)] = address
    return [gpus[number] for number in sorted(gpus)]


def _intel(root: Path, environment: Mapping[str, str]) -> list[str]:
    """By PCI address, whatever the mask's order; a tile is a GPU unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE."""
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
    # Where tiles are devices, CARD.TILE names nothing; where cards are, it names a card that has this tile alone.
    names = [name.strip() for name in mask.split(",")]
    named = {name if is_flat else name.partition(".")[0] for name in names}
    return [gpu for index, gpu in enumerate(gpus) if str(index) in named]


def _fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """The lines `name value` of a file; none where it cannot be read."""
    try:
        lines = [line.split(separator, 1) for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {words[0].strip(): words[1].strip() for words in lines if len(words) == 2}
