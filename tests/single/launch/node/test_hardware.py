"""The GPUs of invented machines, and CPU binding there and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.node import hardware
from lockstep.launch.node.hardware import cpus_near_gpu, cpus_of, describe, numa_nodes, thread_siblings, visible_gpus

# Two sockets of four cores with two threads each, numbered as Intel's are: 0-3, 8-11 and 4-7, 12-15.
NODES = [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
CORES = [{core, core + 8} for core in range(8)]
ALL = set(range(16))
FIRST, SECOND, THIRD = "0000:07:00.0", "0000:46:00.0", "0000:c1:00.0"  # addresses of GPUs


@pytest.mark.parametrize(
    ("kind", "size", "usable", "bound"),
    [
        ("cores", 2, ALL, ["0-3,8-11", "4-7,12-15"]),
        ("cores", 3, ALL, ["0-2,8-10", "3-5,11-13", "6-7,14-15"]),
        ("cores", 8, ALL, [f"{core},{core + 8}" for core in range(8)]),
        ("cores", 2, {1, 2, 9, 10}, ["1,9", "2,10"]),
        ("cores", 2, {1, 2, 9, 12}, ["1-2,9", "12"]),
        ("cores", 3, {0, 8, 4}, ["0", "8", "4"]),  # more workers than cores
        ("cores", 4, {0, 1, 2}, [None] * 4),
        ("numa", 1, ALL, ["0-15"]),
        ("numa", 2, ALL, ["0-3,8-11", "4-7,12-15"]),
        ("numa", 4, ALL, ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2),
        ("numa", 3, {0, 1, 2, 3, 4, 5}, ["0-3", "0-3", "4-5"]),  # in proportion
        ("numa", 2, {0, 1}, ["0-1", "0-1"]),
        ("numa", 4, {0, 4}, ["0", "0", "4", "4"]),
    ],
)
def test_workers_have_their_share(kind: str, size: int, usable: set[int], bound: list[str | None]) -> None:
    found = [cpus_of(kind, rank, size, usable, NODES, CORES) for rank in range(size)]
    assert [cpus and describe(cpus) for cpus in found] == bound


def test_blocks_keep_to_nodes() -> None:
    nodes = [{2 * number, 2 * number + 1} for number in range(8)]
    found = [cpus_of("numa", rank, 3, set(range(16)), nodes, []) for rank in range(3)]
    assert found == [{*range(4)}, {*range(4, 10)}, {*range(10, 16)}]
    assert cpus_of("cores", 0, 2, range(8), [{0, 2, 4, 6}, {1, 3, 5, 7}], []) == {0, 2, 4, 6}  # which alternate
    # Nothing is known of the machine.
    assert [cpus_of("cores", rank, 2, {0, 1, 2}, [], []) for rank in range(2)] == [{0, 1}, {2}]
    assert cpus_of("numa", 0, 2, {0, 1, 2}, [], []) is None


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[set[int]], list[set[int]], set[int]]:
    """NUMA nodes, cores and usable CPUs, with the CPUs in any order."""
    threads, cores, count = draw(st.integers(1, 2)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    numbers = draw(st.permutations(range(threads * cores)))
    siblings = [set(numbers[core * threads : (core + 1) * threads]) for core in range(cores)]
    owners = [draw(st.integers(0, count - 1)) for _ in range(cores)]
    nodes: list[set[int]] = [set() for _ in range(count)]
    for core, owner in zip(siblings, owners, strict=True):
        nodes[owner] |= core
    return nodes, siblings, draw(st.sets(st.sampled_from(sorted(numbers)), min_size=1))


@given(machines(), st.integers(1, 16))
def test_cores_are_a_partition(machine: tuple[list[set[int]], list[set[int]], set[int]], size: int) -> None:
    nodes, siblings, usable = machine
    shares = [cpus_of("cores", rank, size, usable, nodes, siblings) for rank in range(size)]
    if len(usable) < size:
        assert shares == [None] * size
        return
    bound = [share for share in shares if share]
    assert len(bound) == size
    assert sorted(cpu for share in bound for cpu in share) == sorted(usable)
    cores = [core & usable for core in siblings if core & usable]
    if len(cores) >= size:
        assert all(sum(core <= share for share in bound) == 1 for core in cores)
        numbers = [sum(core <= share for core in cores) for share in bound]
        assert max(numbers) - min(numbers) <= 1
        assert numbers == sorted(numbers, reverse=True)


@given(machines(), st.integers(1, 16))
def test_numa_gives_whole_nodes(machine: tuple[list[set[int]], list[set[int]], set[int]], size: int) -> None:
    nodes, siblings, usable = machine
    usable_nodes = [node & usable for node in nodes if node & usable]
    shares = [cpus_of("numa", rank, size, usable, nodes, siblings) for rank in range(size)]
    bound = [share for share in shares if share]
    assert len(bound) == size
    if size >= len(usable_nodes):
        assert all(share in usable_nodes for share in bound)
        places = [usable_nodes.index(share) for share in bound]
        assert places == sorted(places)
    else:
        assert sorted(cpu for share in bound for cpu in share) == sorted(usable)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def two_nodes(root: Path, gpu_nodes: list[int]) -> None:
    """A machine with one NVIDIA GPU for each number, which is that of its NUMA node."""
    write(root, {"sys/devices/system/node/node0/cpulist": "0-3", "sys/devices/system/node/node1/cpulist": "4-7"})
    for number, node in enumerate(gpu_nodes):
        address = f"0000:{number:02x}:00.0"
        write(root, {f"dev/nvidia{number}": "", f"sys/bus/pci/devices/{address}/numa_node": str(node)})
        write(root, {f"proc/driver/nvidia/gpus/{address}/information": f"Device Minor: \t {number}"})


@pytest.mark.parametrize(
    ("gpu_nodes", "size", "visible", "bound"),
    [
        ([1, 1, 0, 0], 4, {}, ["4-6", "4-6", "1-3", "1-3"]),  # as a DGX A100 numbers them
        ([1, 1, 0, 0], 2, {}, ["4-6", "4-6"]),
        ([1, 1, 0, 0], 2, {"CUDA_VISIBLE_DEVICES": "3,0"}, ["1-3", "4-6"]),
        ([1, 1, 0, 0], 1, {"CUDA_VISIBLE_DEVICES": "2"}, ["1-3"]),
        ([1, -1], 2, {}, ["4-6", ""]),
        ([1, 0], 2, {"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, ["", ""]),
        ([1, 0], 3, {}, ["", "", ""]),  # fewer GPUs than workers, which then have none or share them
        ([], 2, {}, ["", ""]),
    ],
)
def test_numa_is_the_node_of_the_gpu(
    gpu_nodes: list[int], size: int, visible: dict[str, str], bound: list[str], tmp_path: Path
) -> None:
    two_nodes(tmp_path, gpu_nodes)
    usable = {1, 2, 3, 4, 5, 6}
    assert [describe(cpus_near_gpu(rank, size, usable, tmp_path, visible)) for rank in range(size)] == bound


def test_gpus_of_amd_have_a_node_too(tmp_path: Path) -> None:
    two_nodes(tmp_path, [])
    for node, (bus, numa) in enumerate([(0xC1, 1), (0xC6, 0)], start=4):
        text = f"simd_count 440\nlocation_id {bus << 8}\ndomain 0"
        write(tmp_path, {f"sys/class/kfd/kfd/topology/nodes/{node}/properties": text})
        write(tmp_path, {f"sys/bus/pci/devices/0000:{bus:02x}:00.0/numa_node": str(numa)})
    assert [cpus_near_gpu(rank, 2, ALL, tmp_path, {}) for rank in range(2)] == [{4, 5, 6, 7}, {0, 1, 2, 3}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_worker_is_bound_near_its_gpu_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    changes: list[tuple[Any, str, Any]] = [
        (os, "sched_setaffinity", lambda _, cpus: bound.append(cpus)),
        (hardware, "cpus_near_gpu", lambda *_: {5}),
    ]
    for module, name, function in changes:
        monkeypatch.setattr(module, name, function)
    for kind in ("numa", "cores"):
        hardware.bind_worker(kind, {"HOROVOD_RANK": "0", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"})
    assert bound[0] == {5} != bound[1]


def test_the_machine_is_read_from_sysfs(tmp_path: Path) -> None:
    files = {"node/online": "0-1,3", "node/node0/cpulist": "0-1,4", "node/node1/cpulist": ""}
    files |= {"node/node3/cpulist": "2", "cpu/cpu0/topology/thread_siblings_list": "0,4"}
    write(tmp_path, files)
    assert numa_nodes(str(tmp_path)) == [{0, 1, 4}, {2}]
    assert thread_siblings({0}, str(tmp_path)) == [{0, 4}]
    assert thread_siblings({0, 1}, str(tmp_path)) is None
    assert numa_nodes(str(tmp_path / "cpu")) is None
    (tmp_path / "node/online").write_text("all\n")
    assert numa_nodes(str(tmp_path)) is None


@pytest.mark.parametrize(("cpus", "text"), [(set(), ""), ({3}, "3"), ({0, 1, 2, 8}, "0-2,8"), ({1, 3}, "1,3")])
def test_cpus_are_written_as_linux_does(cpus: set[int], text: str) -> None:
    assert describe(cpus) == text


BIND = """
import os, runpy, sys
kind, rank, size = sys.argv[2:]
worker = {"HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank, "HOROVOD_LOCAL_SIZE": size}
runpy.run_path(sys.argv[1])["bind_worker"](kind, worker)
assert "lockstep" not in sys.modules
print(sorted(os.sched_getaffinity(0)))
"""


def bind(kind: str, rank: int, size: int) -> subprocess.CompletedProcess[str]:
    """What a process is bound to after `bind_worker` in an interpreter without site packages."""
    line = [sys.executable, "-I", "-S", "-c", BIND, hardware.__file__, kind, str(rank), str(size)]
    return subprocess.run(line, check=True, capture_output=True, text=True)


@pytest.mark.cold
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_is_bound_on_this_machine() -> None:
    usable = sorted(os.sched_getaffinity(0))
    shares = [bind("cores", rank, len(usable)) for rank in range(len(usable))]
    assert sorted(share.stdout for share in shares) == sorted(f"[{cpu}]\n" for cpu in usable)
    assert all(f"worker {rank} is bound to CPUs" in share.stderr for rank, share in enumerate(shares))
    assert bind("none", 0, 1).stdout == f"{usable}\n"
    too_many = bind("cores", 0, len(usable) + 1)
    assert too_many.stdout == f"{usable}\n"
    assert "--bind cores has no effect" in too_many.stderr
    assert bind("numa", 0, 1).returncode == 0


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
