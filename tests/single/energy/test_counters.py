"""Which counters of a host count, in folders like /, and what is said of the others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from energy_counters import cray, hwmon, rapl, write_counters

from lockstep.energy import counters
from lockstep.energy.counters import find_counters

PACKAGES = rapl("intel-rapl:0", "package-0", 2_000_000) | rapl("intel-rapl:1", "package-1", 3_000_000)
PARTS = rapl("intel-rapl:0:0", "core", 1_000_000) | rapl("intel-rapl:0:1", "dram", 500_000)
TWICE = rapl("intel-rapl:2", "psys", 9_000_000) | rapl("intel-rapl-mmio:0", "package-0", 2_000_000)
SOCKETS = hwmon(0, "amd_energy", Ecore000=1, Esocket0=4_000_000, Esocket1=6_000_000)


@pytest.mark.parametrize(
    ("files", "gpus", "joules"),
    [
        (PACKAGES | PARTS | TWICE, [], {"cpu": 5.5}),
        (SOCKETS, [], {"cpu": 10.0}),
        (PACKAGES | SOCKETS, [], {"cpu": 5.0}),
        (cray(energy=900, cpu_energy=300, memory_energy=100, accel0_energy=400) | PACKAGES, None, {"node": 900.0}),
        (cray(cpu_energy=300, memory_energy=100, accel0_energy=250, accel1_energy=150), None, {"cpu": 400, "gpu": 400}),
        (cray(cpu_energy=300, memory_energy=100, accel0_energy=250) | PACKAGES, [], {"cpu": 5.0}),
        (PACKAGES | hwmon(3, "xe", card=7_000_000, pkg=6_000_000), None, {"cpu": 5.0, "gpu": 7.0}),
        (PACKAGES | hwmon(3, "coretemp", other=7_000_000), None, {"cpu": 5.0}),
    ],
)
def test_no_part_of_a_host_is_counted_twice(
    files: dict[str, object], gpus: list[str] | None, joules: dict[str, float], tmp_path: Path
) -> None:
    found, unread = find_counters(gpus, write_counters(tmp_path, files))
    sums: dict[str, float] = {}
    for counter in found:
        sums[counter.kind] = sums.get(counter.kind, 0.0) + counter.read()
    assert sums == pytest.approx(joules)
    assert not unread
    assert len({counter.name for counter in found}) == len(found)


def test_missing_rights_are_named_with_the_files_and_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_counters(tmp_path, PACKAGES)
    read = counters._read

    def denied(path: Path, unit: float) -> float:  # for root, a file has no rights to miss
        if "intel-rapl:1" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, unit)

    monkeypatch.setattr(counters, "_read", denied)
    found, unread = find_counters([], root)
    assert [counter.name for counter in found] == ["package-0 (intel-rapl:0)"]
    folder = root / "sys/class/powercap"
    fix = f'an administrator allows it with "chmod a+r {folder}/intel-rapl:*/energy_uj"'
    assert unread == [f"CPU: no right to read {folder}/intel-rapl:1/energy_uj; {fix}"]


def test_a_damaged_counter_and_a_host_without_any_are_named(tmp_path: Path) -> None:
    assert find_counters([], tmp_path) == ([], ["CPU: this host has no energy counters"])
    root = write_counters(
        tmp_path, rapl("intel-rapl:0", "package-0") | {"sys/class/powercap/intel-rapl:0/energy_uj": ""}
    )
    found, (line,) = find_counters([], root)
    assert not found
    assert line.startswith(f"CPU: {root}/sys/class/powercap/intel-rapl:0/energy_uj: ")


def _millijoules(handle: int) -> int:
    if handle == 2:
        raise RuntimeError("Not Supported")
    return 1000 * (handle + 1)


NVML: Any = SimpleNamespace(  # with three GPUs, of which the last one cannot count
    nvmlInit=lambda: None,
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=f"00000000:{16 * handle + 0xA:02X}:00.0"),
    nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=40 + handle, memory=7),
    nvmlDeviceGetTotalEnergyConsumption=_millijoules,
)


def _amdsmi(name: str) -> Any:
    """Stands in for amdsmi with one GPU, whose counter has a unit."""
    return SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["gpu"],
        amdsmi_get_gpu_device_bdf=lambda handle: "0000:c1:00.0",
        amdsmi_get_energy_count=lambda handle: {name: 2_000_000, "counter_resolution": 15.3, "timestamp": 1},
    )


@pytest.mark.parametrize(
    ("gpus", "names", "joules", "unread"),
    [
        (["0000:0a:00"], ["GPU 0000:0a:00"], 1.0, []),
        (["0000:0a:00", "0000:1a:00"], ["GPU 0000:0a:00", "GPU 0000:1a:00"], 3.0, []),
        (["0000:2a:00"], [], 0.0, ["GPU 0000:2a:00: Not Supported"]),
        (None, ["GPU 0000:0a:00", "GPU 0000:1a:00"], 3.0, ["GPU 0000:2a:00: Not Supported"]),
        (["0000:ff:00"], [], 0.0, ["GPU: no library or driver counts its energy"]),
    ],
)
def test_only_the_gpus_in_use_are_counted(
    gpus: list[str] | None,
    names: list[str],
    joules: float,
    unread: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NVML)
    root = write_counters(tmp_path, PACKAGES | {"proc/driver/nvidia/gpus/list": ""})
    found, problems = find_counters(gpus, root)
    of_gpus = [counter for counter in found if counter.kind == "gpu"]
    assert [counter.name for counter in of_gpus] == names
    assert [counter.busy() for counter in of_gpus if counter.busy] == [0.4, 0.41][: len(names)]
    assert sum(counter.read() for counter in of_gpus) == pytest.approx(joules)
    assert problems == unread


@pytest.mark.parametrize("name", ["energy_accumulator", "power"])
def test_amds_counter_is_in_joules_beside_the_drivers_use(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", _amdsmi(name))
    files = PACKAGES | {"dev/kfd": "", "sys/bus/pci/devices/0000:c1:00.0/gpu_busy_percent": 37}
    found, unread = find_counters(["0000:c1:00"], write_counters(tmp_path, files))
    assert (found[-1].name, found[-1].read(), unread) == ("GPU 0000:c1:00", pytest.approx(30.6), [])
    assert [counter.busy() for counter in found if counter.busy] == [0.37]


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _, (line,) = find_counters(
        ["0000:0a:00"], write_counters(tmp_path, PACKAGES | {"proc/driver/nvidia/gpus/list": ""})
    )
    assert line.startswith("GPU: pynvml (pip install nvidia-ml-py): ")
