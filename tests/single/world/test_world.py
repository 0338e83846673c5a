"""A worker's device, and how its connection is asked for: on machines whose GPUs are made up."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"

from lockstep.errors import WorldError, first_line
from lockstep.world import accelerator, world
from lockstep.world.devices import check_devices, choose_device
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

FOURTH = RankInfo(3, 4, 3, 4, 0, "Slurm")
ON_SECOND = RankInfo(3, 6, 0, 3, 1, "Slurm")  # three workers a node: by its number on the node it takes GPU 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four CUDA devices, unless a test says otherwise, without the machine's own variables."""
    for name in (*accelerator.VISIBLE, "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    have(monkeypatch, 4)
    return monkeypatch


def have(patch: pytest.MonkeyPatch, count: int, kind: str = "cuda") -> None:
    patch.setattr(accelerator, "kind", lambda: kind)
    patch.setattr(accelerator, "count", lambda: count)


@pytest.mark.parametrize(
    ("count", "visible", "index"), [(4, None, 3), (4, "0,1,2,3", 3), (1, "0", 0), (1, "3", 0), (1, "MIG-1234", 0)]
)
@pytest.mark.parametrize("name", accelerator.VISIBLE)
def test_a_worker_takes_its_own_gpu(
    gpus: pytest.MonkeyPatch, count: int, visible: str | None, index: int, name: str
) -> None:
    have(gpus, count)
    if visible:
        gpus.setenv(name, visible)
    assert choose_device(FOURTH, "auto") == torch.device("cuda", index)


@pytest.mark.parametrize(("count", "visible"), [(1, None), (2, None), (2, "0,1"), (3, "0,1,2")])
def test_more_workers_than_gpus_are_an_error(gpus: pytest.MonkeyPatch, count: int, visible: str | None) -> None:
    have(gpus, count)
    gpus.setenv("SLURM_GPUS_ON_NODE", str(count))
    if visible:
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = rf"4 workers on .* {count} GPUs?.*SLURM_GPUS_ON_NODE={count}.*--gpu-bind=none.*--dist-backend gloo"
    with pytest.raises(WorldError, match=said):
        choose_device(FOURTH, "cuda")


@pytest.mark.parametrize(("count", "visible", "index"), [(1, None, 0), (2, "0,1", 1), (3, None, 0), (4, None, 3)])
def test_by_gloo_workers_share_gpus_in_turn(
    gpus: pytest.MonkeyPatch, count: int, visible: str | None, index: int
) -> None:
    have(gpus, count)
    if visible:
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device(FOURTH, "auto", may_share=True) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("kind", "size", "asked", "chosen"),
    [
        ("cuda", 4, "auto", "cuda:3"),
        ("cuda", 4, "gpu", "cuda:3"),
        ("cuda", 4, "cpu", "cpu"),
        ("xpu", 4, "auto", "xpu:3"),
        ("xpu", 4, "gpu", "xpu:3"),
        ("xpu", 4, "cuda", "--device cuda: torch finds no CUDA device"),
        ("mps", 1, "auto", "mps:0"),
        ("mps", 1, "gpu", "mps:0"),
        ("mps", 4, "auto", "cpu"),
        ("mps", 4, "mps", "--device mps supports only a single worker"),
        (None, 4, "auto", "cpu"),
        (None, 4, "gpu", "--device gpu: torch finds no accelerator"),
        (None, 4, "xpu", "--device xpu: torch finds no XPU device"),
    ],
)
def test_every_kind_of_device(gpus: pytest.MonkeyPatch, kind: str, size: int, asked: str, chosen: str) -> None:
    have(gpus, 4, kind)
    rank_info = FOURTH if size > 1 else RankInfo()
    if chosen.startswith("--"):
        with pytest.raises(WorldError, match=chosen):
            choose_device(rank_info, asked)
    else:
        assert str(choose_device(rank_info, asked)) == chosen


def told_by(*workers: tuple[str, str, str, str]) -> dist.Store:
    """A store in which workers have said host, kind of device, its card and its identity."""
    store = dist.HashStore()
    for rank, said in enumerate(workers):
        store.set(f"exchanged/{rank}", json.dumps(said))
    return store


def check(gpus: pytest.MonkeyPatch, library: str, *others: tuple[str, str, str, str]) -> None:
    """As the last worker, on host "a"."""
    gpus.setattr(socket, "gethostname", lambda: "a")
    gpus.setattr(accelerator, "card", lambda device: "card 2")
    gpus.setattr(accelerator, "identity", lambda device: "GPU-2")
    rank_info = RankInfo(len(others), len(others) + 1, 0, 1)
    check_devices(rank_info, torch.device("cuda", 0), library, told_by(*others))


def test_workers_that_share_a_gpu_are_named(gpus: pytest.MonkeyPatch) -> None:
    check(gpus, "nccl", ("a", "cuda", "card 1", "GPU-1"), ("b", "cuda", "card 2", "GPU-2"))
    shared = ("a", "cuda", "card 1", "GPU-1"), ("a", "cuda", "card 2", "GPU-2"), ("b", "cuda", "card 2", "GPU-2")
    with pytest.raises(WorldError, match=r"workers \[1, 3\] on a share the GPU GPU-2: .*--gpu-bind=none"):
        check(gpus, "nccl", *shared)
    check(gpus, "gloo", *shared)


def test_two_instances_of_one_gpu_are_refused_for_nccl(gpus: pytest.MonkeyPatch) -> None:
    gpus.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(WorldError, match=r"workers \[0, 1\] on a have parts \(MIG instances\) of one GPU, card 2"):
        check(gpus, "nccl", ("a", "cuda", "card 2", "GPU-2 MIG-1"))
    check(gpus, "gloo", ("a", "cuda", "card 2", "GPU-2 MIG-1"))


def test_a_worker_without_a_gpu_is_named(gpus: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match=r"differ: cuda for workers \[0, 2\] \(a\), cpu for workers \[1\] \(b\)"):
        check(gpus, "nccl", ("a", "cuda", "card 1", "GPU-1"), ("b", "cpu", "", ""))


class Captured(Exception):
    """What would have been asked of torch.distributed."""


@pytest.fixture
def asked(gpus: pytest.MonkeyPatch) -> dict[str, Any]:
    """What init_process_group was called with; it is not gone into."""
    arguments: dict[str, Any] = {}

    def capture(*args: Any, **kwargs: Any) -> None:
        assert not args
        arguments.update(kwargs)
        raise Captured

    own = told_by(*[("a", "cuda", f"card {rank}", f"GPU-{rank}") for rank in range(6)])
    gpus.setattr(world, "open_store", lambda *_: own)
    gpus.setattr(dist, "PrefixStore", lambda prefix, store: store)
    gpus.setattr(dist, "init_process_group", capture)
    gpus.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    gpus.setattr(accelerator, "card", lambda device: "card 3")
    gpus.setattr(accelerator, "identity", lambda device: "GPU-3")
    gpus.setattr(accelerator, "use", lambda device: arguments.setdefault("used", device))
    return arguments


@pytest.mark.parametrize(("kind", "library"), [("cuda", "nccl"), ("xpu", "xccl")])
def test_the_group_is_bound_to_the_chosen_gpu(
    gpus: pytest.MonkeyPatch, asked: dict[str, Any], kind: str, library: str
) -> None:
    have(gpus, 4, kind)
    order = []
    gpus.setattr(world, "check_devices", lambda rank_info, device, *_: order.append((device, dict(asked))))
    with pytest.raises(Captured), connect(ON_SECOND):
        pass
    device = torch.device(kind, 0)
    assert order == [(device, {"used": device})]  # compared before the group is made
    assert asked.pop("store") is not None
    options = asked.pop("pg_options")
    if kind == "cuda":  # as hvd's
        assert (options.is_high_priority_stream, options._timeout) == (True, asked["timeout"])
        options = None
    assert options is None
    assert asked == {
        "used": device,
        "backend": f"cpu:gloo,{kind}:{library}",
        "device_id": device,
        "rank": 3,
        "world_size": 6,
        "timeout": timedelta(minutes=30),
    }


SHARED_MEMORY = "Error while creating shared memory segment /dev/shm/nccl-Tq3QYb (size 33030528), error: No space left"
NCCL_FIX = "enlarge /dev/shm (docker run --shm-size=2g), or set NCCL_SHM_DISABLE=1; NCCL_DEBUG=INFO prints more"
OF_GLOO = "GLOO_SOCKET_IFNAME sets the network interface; NCCL_DEBUG=INFO prints more"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"NCCL error in: a.cpp:94\nncclSystemError: a call failed.\nLast error:\n{SHARED_MEMORY}", NCCL_FIX),
        ("Gloo connectFullMesh failed", OF_GLOO),
    ],
)
def test_connection_error_has_the_hint_of_its_library(
    gpus: pytest.MonkeyPatch, asked: dict[str, Any], text: str, said: str
) -> None:
    def fail(**_: Any) -> None:
        raise dist.DistBackendError(text)

    have(gpus, 4, "cuda")
    gpus.setattr(world, "check_devices", lambda *_: None)
    gpus.setattr(dist, "init_process_group", fail)
    with pytest.raises(WorldError) as caught, connect(ON_SECOND):
        pass
    line = str(caught.value).partition("cannot connect to its 5 peers: ")[2]
    assert line == f"{first_line(dist.DistBackendError(text)).partition('; enlarge')[0]}; {said}"


def test_the_devices_are_compared_before_the_group_is_made(asked: dict[str, Any], gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(socket, "gethostname", lambda: "a")
    shared = told_by(*[("a", "cuda", "card 3", "GPU-3")] * 6)
    gpus.setattr(world, "open_store", lambda *_: shared)
    with pytest.raises(WorldError, match=r"workers \[0, 1, 2, 3, 4, 5\] on a share the GPU GPU-3"), connect(ON_SECOND):
        pass
    assert "backend" not in asked


@pytest.mark.parametrize(("device", "backend"), [("cpu", "auto"), ("auto", "gloo")])
def test_gloo_alone_is_bound_to_no_device(asked: dict[str, Any], device: Any, backend: Any) -> None:
    with pytest.raises(Captured), connect(ON_SECOND, device, backend):
        pass
    assert asked["backend"] == "gloo"
    assert "device_id" not in asked


@pytest.mark.parametrize(
    ("kind", "device", "backend"), [("cuda", "cpu", "nccl"), ("xpu", "auto", "nccl"), ("cuda", "auto", "xccl")]
)
def test_a_backend_for_other_devices_is_refused(gpus: pytest.MonkeyPatch, kind: str, device: Any, backend: Any) -> None:
    have(gpus, 4, kind)
    refused = pytest.raises(WorldError, match=f"--dist-backend {backend} does not support tensors on")
    with refused, connect(FOURTH, device, backend):
        pass
