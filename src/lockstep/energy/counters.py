"""Finds a host's energy counters. One that cannot be read is named with the reason; nothing is estimated.

Cray's `energy` is that of the node, which includes all others, so that only it counts. Otherwise, CPUs and GPUs each
have the first source that can be read. RAPL's packages include their cores; `intel-rapl-mmio` counts them again, and
`psys` includes them. What other jobs use of a CPU or a node is included.

Sources: the kernel's Documentation/power/powercap and Documentation/hwmon, NVML's nvmlDeviceGetTotalEnergyConsumption,
amdsmi_get_energy_count; of a GPU's use nvmlDeviceGetUtilizationRates, and gpu_busy_percent in Documentation/gpu/amdgpu.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {"cpu": "CPUs with memory", "gpu": "GPUs in use", "node": "whole nodes"}
FILES = (
    ("node", "sys/cray/pm_counters/energy", 1.0, "", ("",)),
    ("cpu", "sys/class/powercap/intel-rapl:*/energy_uj", 1e-6, "", ("package", "dram")),
    ("cpu", "sys/cray/pm_counters/*_energy", 1.0, "", ("cpu_", "memory_")),
    ("cpu", "sys/class/hwmon/hwmon*/energy*_input", 1e-6, "amd_energy", ("Esocket",)),
    ("gpu", "sys/class/hwmon/hwmon*/energy*_input", 1e-6, "xe", ("card",)),
    ("gpu", "sys/class/hwmon/hwmon*/energy*_input", 1e-6, "i915", ("",)),
    ("gpu", "sys/cray/pm_counters/*_energy", 1.0, "", ("accel",)),
)
"""Kind, files, joules of a unit, hwmon's driver, and the beginnings of labels that count."""


class EnergyCounter(NamedTuple):
    """A counter of the joules used by one of `KINDS`, at the PCI address if it is a GPU. Its name is that on its host.

    It starts again at 0 after `range_joules`, if that is not 0. `busy` reads in which share of the last moment the GPU
    computed anything; None: unknown.
    """

    kind: str
    name: str
    read: Callable[[], float]
    range_joules: float = 0.0
    address: str = ""
    busy: Callable[[], float] | None = None


Found = tuple[list[EnergyCounter], list[str]]  # the counters to read, and what cannot be read, with the reason


def find_counters(gpus: Collection[str] | None = None, root: Path = Path("/")) -> Found:
    """Find the energy counters of this host.

    Args:
        gpus: The PCI addresses of the GPUs to count; None: all of the host.
        root: The folder in which /sys and /proc are.
    """
    files = [(source[0], partial(_in_files, root, *source)) for source in FILES]
    node, denied = _first([find for kind, find in files if kind == "node"])
    if node:
        return node, []
    cpus, unread = _first([find for kind, find in files if kind == "cpu"])
    if not cpus and not unread:
        unread = ["CPU: this host has no energy counters"]
    if gpus is not None and not gpus:
        return cpus, [*denied, *unread]
    found, problems = _first([partial(_of_libraries, root, gpus), *(find for kind, find in files if kind == "gpu")])
    if gpus and not found and not problems:
        problems = ["GPU: no library or driver counts its energy"]
    return [*cpus, *found], [*denied, *unread, *problems]


def _first(sources: Collection[Callable[[], Found]]) -> Found:
    """Return what the first source with counters has; what cannot be read in any source, if none has."""
    unread = []
    for source in sources:
        found, problems = source()
        if found:
            return found, problems
        unread += problems
    return [], unread


def _in_files(root: Path, kind: str, pattern: str, unit: float, driver: str, labels: tuple[str, ...]) -> Found:
    found, denied, unread = [], list[str](), list[str]()
    for path in sorted(root.glob(pattern)):
        name = _text(path.parent / "name")
        label = _text(path.with_name(path.name.replace("_input", "_label"))) if driver else name or path.name
        if driver not in ("", name) or not label.startswith(labels):
            continue
        counter = f"{label or name} ({path.parent.name})"
        try:
            _read(path, unit)
            span = int(_text(path.with_name("max_energy_range_uj")) or 0) * unit
            found.append(EnergyCounter(kind, counter, partial(_read, path, unit), span))
        except PermissionError:
            denied.append(str(path))
        except (OSError, ValueError, IndexError) as error:
            unread.append(f"{kind.upper()}: {path}: {getattr(error, 'strerror', None) or error}")
    if denied:
        fix = f'an administrator allows it with "chmod a+r {root / pattern}"'
        unread.append(f"{kind.upper()}: no right to read {', '.join(denied)}; {fix}")
    return found, unread


def _read(path: Path, unit: float) -> float:
    return int(path.read_text(encoding="ascii").split()[0]) * unit


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


Readers = dict[str, tuple[Callable[[], float], Callable[[], float] | None]]  # of energy and use, by PCI address


def _nvidia(nvml: Any) -> Readers:
    nvml.nvmlInit()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def read(handle: Any) -> float:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3  # from millijoules

    def busy(handle: Any) -> float:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100

    return {nvml.nvmlDeviceGetPciInfo(each).busId: (partial(read, each), partial(busy, each)) for each in handles}


def _amd(smi: Any) -> Readers:
    smi.amdsmi_init()

    def read(handle: Any) -> float:
        found = smi.amdsmi_get_energy_count(handle)  # in units of so many microjoules; ROCm 5 names it "power"
        return float(found.get("energy_accumulator", found.get("power")) * found["counter_resolution"]) * 1e-6

    handles = smi.amdsmi_get_processor_handles()
    return {smi.amdsmi_get_gpu_device_bdf(each): (partial(read, each), None) for each in handles}


LIBRARIES: tuple[tuple[str, str, str, Callable[[Any], Readers]], ...] = (
    ("proc/driver/nvidia/gpus", "pynvml", "pip install nvidia-ml-py", _nvidia),
    ("dev/kfd", "amdsmi", "a part of ROCm", _amd),
)
"""A path that exists where its GPUs are, the library's module, where it comes from, and how to use it."""


def _of_libraries(root: Path, wanted: Collection[str] | None) -> Found:
    found, unread = [], []
    for sign, module, source, readers in LIBRARIES:
        try:
            listed = readers(import_module(module)) if (root / sign).exists() else {}
        except Exception as error:  # also the library's own
            unread.append(f"GPU: {module} ({source}): {error}")
            continue
        for address, (read, busy) in listed.items():
            name = f"GPU {(plain := plain_address(address))}"
            try:
                if wanted is None or plain in wanted:
                    read()
                    files = root.glob(f"sys/bus/pci/devices/{plain}.*/gpu_busy_percent")  # of AMD's driver
                    busy = next((partial(_read, path, 0.01) for path in files), busy)
                    found.append(EnergyCounter("gpu", name, read, address=plain, busy=busy))
            except Exception as error:  # the library's own, such as for GPUs before Volta
                unread.append(f"{name}: {error}")
    return found, unread


def plain_address(address: str | bytes) -> str:
    """Return a PCI address such as 00000000:4D:00.0 as 0000:4d:00."""
    text = address.decode() if isinstance(address, bytes) else address
    domain, bus, number = (int(part.partition(".")[0], 16) for part in text.strip("\0").split(":"))
    return f"{domain:04x}:{bus:02x}:{number:02x}"
