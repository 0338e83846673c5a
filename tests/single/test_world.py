"""A worker's device."""

from __future__ import annotations

import pytest
import torch

from lockstep.errors import WorldError
from lockstep.place import Place
from lockstep.world import World, _check_devices, _choose_device

FOURTH = Place(3, 4, 3, 4, 0, "Slurm")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without the machine's own variables; a test says how many GPUs torch finds."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("count", "visible", "index"), [(4, None, 3), (4, "0,1,2,3", 3), (1, "0", 0), (1, "3", 0), (1, "MIG-1234", 0)]
)
def test_a_worker_takes_its_own_gpu(gpus: pytest.MonkeyPatch, count: int, visible: str | None, index: int) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    if visible:
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _choose_device(FOURTH, "auto") == torch.device("cuda", index)


@pytest.mark.parametrize(("count", "visible"), [(1, None), (2, None), (2, "0,1"), (3, "0,1,2")])
def test_more_workers_than_gpus_are_an_error(gpus: pytest.MonkeyPatch, count: int, visible: str | None) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    gpus.setenv("SLURM_GPUS_ON_NODE", str(count))
    if visible:
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = rf"4 workers on .* {count} GPUs?.*SLURM_GPUS_ON_NODE={count}.*--gpus-per-task.*--dist-backend gloo"
    with pytest.raises(WorldError, match=said):
        _choose_device(FOURTH, "cuda")


@pytest.mark.parametrize(("count", "visible", "index"), [(1, None, 0), (2, "0,1", 1), (3, None, 0), (4, None, 3)])
def test_by_gloo_workers_share_gpus_in_turn(
    gpus: pytest.MonkeyPatch, count: int, visible: str | None, index: int
) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: count)
    if visible:
        gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _choose_device(FOURTH, "auto", may_share=True) == torch.device("cuda", index)


def test_workers_that_share_a_gpu_are_named(gpus: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    def said(world: World, value: list[str]) -> list[list[str]]:
        return [["a", "GPU-1 "], ["a", "GPU-2 "], ["b", "GPU-1 "], *others]

    others: list[list[str]] = []
    gpus.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    gpus.setattr(World, "gather", said)
    world = World(FOURTH, torch.device("cuda", 0))
    _check_devices(world)
    others.append(["a", "GPU-2 "])
    with pytest.raises(WorldError, match=r"workers \[1, 3\] on a share the GPU GPU-2: .*--gpus-per-task=1"):
        _check_devices(world)
