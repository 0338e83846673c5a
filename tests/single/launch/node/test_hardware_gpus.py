"""GPUs of machines made up: which a process sees, and at which PCI addresses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.launch.node.hardware import visible_gpus

FIRST, SECOND, THIRD = "0000:07:00.0", "0000:46:00.0", "0000:c1:00.0"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def nvidia(root: Path, minors: dict[str, int], devices: tuple[int, ...]) -> None:
    """The driver's list, by PCI address, and the device files that are here."""
    information = "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-1a\nDevice Minor: \t {}\n"
    write(root, {f"proc/driver/nvidia/gpus/{name}/information": information.format(minors[name]) for name in minors})
    write(root, {f"dev/nvidia{minor}": "" for minor in devices})
    write(root, {"dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-caps/nvidia-cap1": ""})


def amd(root: Path, nodes: dict[int, tuple[int, int]]) -> None:
    """KFD nodes: the number of SIMDs, and the location."""
    for number, (simds, location) in nodes.items():
        text = f"cpu_cores_count 0\nsimd_count {simds}\nlocation_id {location}\ndomain 0\n"
        write(root, {f"sys/class/kfd/kfd/topology/nodes/{number}/properties": text})


def intel(root: Path, cards: dict[str, tuple[str, int, int]]) -> None:
    """Graphics cards, by PCI address: driver, render node and tiles."""
    for address, (driver, render, tiles) in cards.items():
        device, drm = root / "sys/devices/pci0000:00" / address, root / f"sys/class/drm/renderD{render}"
        write(root, {f"dev/dri/renderD{render}": "", f"sys/bus/pci/drivers/{driver}/bind": ""})
        folder = "tile{}" if driver == "xe" else "drm/card1/gt/gt{}"
        for tile in range(tiles):
            (device / folder.format(tile)).mkdir(parents=True)
        device.mkdir(parents=True, exist_ok=True)
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(device)
        (device / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [FIRST, SECOND, THIRD]),
        ("0,1", [FIRST, SECOND]),
        ("2, 0", [THIRD, FIRST]),
        ("1", [SECOND]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [FIRST]),
        ("0,3,1", [FIRST]),
        ("GPU-1a,GPU-2b", ["", ""]),
        ("MIG-1a", [""]),
    ],
)
def test_cuda_stops_at_the_first_name_that_it_does_not_know(
    visible: str | None, seen: list[str], tmp_path: Path
) -> None:
    nvidia(tmp_path, {THIRD: 1, FIRST: 0, SECOND: 2}, (0, 1, 2))
    environment = {"ROCR_VISIBLE_DEVICES": "0"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert visible_gpus(tmp_path, environment) == seen


def test_a_container_has_the_gpus_of_its_device_files(tmp_path: Path) -> None:
    nvidia(tmp_path, {FIRST: 0, SECOND: 1, THIRD: 2}, (1,))
    assert visible_gpus(tmp_path, {}) == [SECOND]


def test_a_slurm_job_has_the_gpus_that_it_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ConstrainDevices, all device files are there, and CUDA_VISIBLE_DEVICES counts those that may be opened."""
    nvidia(tmp_path, {FIRST: 0, SECOND: 1, THIRD: 2}, (0, 1, 2))

    def refuse(path: Path, flags: int) -> int:
        if Path(path).name != "nvidia2":
            raise PermissionError
        return opened(path, flags)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    assert visible_gpus(tmp_path, {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0"}) == [THIRD]
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}) == [FIRST]


def test_gpus_that_the_driver_does_not_list_have_no_address(tmp_path: Path) -> None:
    nvidia(tmp_path, {}, (0, 1))
    assert visible_gpus(tmp_path, {}) == ["", ""]


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, [THIRD, FIRST, SECOND]),
        ({"ROCR_VISIBLE_DEVICES": "1,2"}, [FIRST, SECOND]),
        ({"HIP_VISIBLE_DEVICES": "2"}, [SECOND]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [SECOND, THIRD]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, [SECOND]),
        ({"ROCR_VISIBLE_DEVICES": "2,1", "HIP_VISIBLE_DEVICES": "1"}, [FIRST]),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0,1"}, [THIRD]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1a"}, [""]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_rocm_chooses_twice(environment: dict[str, str], seen: list[str], tmp_path: Path) -> None:
    partition = 1 << 28
    amd(tmp_path, {0: (0, 0), 2: (304, 0xC1 << 8), 3: (304, 0x07 << 8 | partition), 10: (304, 0x46 << 8)})
    denied = tmp_path / "sys/class/kfd/kfd/topology/nodes/1/properties"  # as a device of another container is
    denied.mkdir(parents=True)
    assert visible_gpus(tmp_path, environment) == seen


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, [FIRST, FIRST, SECOND, SECOND, THIRD]),
        ({"ZE_AFFINITY_MASK": "4,1"}, [FIRST, THIRD]),
        ({"ZE_AFFINITY_MASK": "0.0,0.1,2"}, [SECOND]),
        ({"ZE_AFFINITY_MASK": ""}, [FIRST, FIRST, SECOND, SECOND, THIRD]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, [FIRST, SECOND, THIRD]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.0,0.1"}, [FIRST]),
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "0.1,2"}, [FIRST, THIRD]),
    ],
)
def test_intels_tiles_are_gpus_and_integrated_graphics_are_none(
    environment: dict[str, str], seen: list[str], tmp_path: Path
) -> None:
    cards = {"0000:00:02.0": ("i915", 128, 1), SECOND: ("xe", 129, 2), FIRST: ("i915", 130, 2), THIRD: ("xe", 131, 1)}
    intel(tmp_path, cards | {"0000:03:00.0": ("ast", 132, 0)})
    assert visible_gpus(tmp_path, environment) == seen


def test_the_first_vendor_counts(tmp_path: Path) -> None:
    amd(tmp_path, {1: (8, 0x0400)})
    intel(tmp_path, {SECOND: ("xe", 128, 1)})
    assert visible_gpus(tmp_path, {}) == ["0000:04:00.0"]
    nvidia(tmp_path, {FIRST: 0}, (0,))
    assert visible_gpus(tmp_path, {"HIP_VISIBLE_DEVICES": ""}) == [FIRST]


def test_a_machine_that_lists_none(tmp_path: Path) -> None:
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    write(tmp_path, {"dev/dxg": ""})  # WSL2
    assert visible_gpus(tmp_path, {}) == []
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0,1"}) == ["", ""]
