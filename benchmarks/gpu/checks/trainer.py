"""Checks of the trainer in two workers that share one GPU through Gloo, compared with one worker on all samples."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.checking import Skip, run_checks
from gpu.device import DEVICE, ON_CUDA, ON_GPU
from gpu.nets import final_weights, step_losses, train_digits
from lockstep.config.schema import BackendChoice
from lockstep.files.jsonl import read_records
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect

WORLDS: list[World] = []
FOLDERS: list[Path] = []


def _losses(world: World, name: str, net: str, **settings: Any) -> list[float]:
    folder = FOLDERS[0] / name
    train_digits(world, net, folder, **{"max_steps": 12, **settings})
    return step_losses(folder) if world.is_main else []


def _compare(net: str, ways: dict[str, dict[str, Any]], tolerance: float, **settings: Any) -> None:
    world = WORLDS[0]
    alone = World(RankInfo(), world.device)
    expected = _losses(alone, f"{net}-alone", net, **settings) if world.is_main else []
    for name, way in ways.items():
        found = _losses(world, f"{net}-{name}", net, **settings, **way)
        if world.is_main:
            np.testing.assert_allclose(found, expected, rtol=tolerance, err_msg=name)
    _clear_folder(world)


def _clear_folder(world: World) -> None:
    world.barrier()
    if world.is_main:
        for path in FOLDERS[0].iterdir():
            shutil.rmtree(path)
    world.barrier()


def check_workers_share_the_device() -> None:
    world = WORLDS[0]
    assert world.device.type == DEVICE.type, world.device
    assert world.size == 2, world.size
    if ON_GPU:
        assert world.device.index == world.rank_info.local_rank % torch.accelerator.device_count()
    assert world.gather(world.rank) == [0, 1]
    numbers = torch.full((1000,), world.rank + 1.0, device=world.device)
    assert bool((world.sum_(numbers) == 3).all())
    assert bool((world.max_(torch.full((3,), float(world.rank), device=world.device)) == 1).all())


def check_every_strategy_is_one_worker_on_all_samples() -> None:
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "horovod": {"strategy": "horovod"},
        "sharded": {"strategy": "ddp", "shard_optimizer": True},
    }
    _compare("plain", ways, 1e-9, precision="fp64")


def check_sync_bn_is_batch_norm_of_all_samples() -> None:
    _compare("normed", {"horovod": {"strategy": "horovod", "sync_bn": True}}, 1e-8, precision="fp64")


def check_levels_and_compression_stay_close() -> None:
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "horovod": {"strategy": "horovod"},
        "fp16": {"strategy": "ddp", "compress": "fp16"},
        "horovod-bf16": {"strategy": "horovod", "compress": "bf16"},
    }
    for precision in ("fp32", "bf16", "O1", "O2") if ON_GPU else ("bf16",):
        _compare("plain", ways, 0.05, precision=precision)


def check_interrupted_and_resumed_by_two() -> None:
    world = WORLDS[0]
    for strategy in ("ddp", "horovod"):
        common = {"strategy": strategy, "precision": "fp64", "max_steps": 8}
        whole = _losses(world, "whole", "plain", **common)
        _losses(world, "parts", "plain", **{**common, "max_steps": 3})
        parts = _losses(world, "parts", "plain", **common, resume="auto")
        if world.is_main:
            np.testing.assert_allclose(parts, whole, rtol=1e-9)
            if not ON_GPU:
                assert final_weights(FOLDERS[0] / "parts") == final_weights(FOLDERS[0] / "whole")
        _clear_folder(world)


def check_torchs_sync_bn_is_batch_norm_of_all_samples() -> None:
    if ON_GPU and not ON_CUDA:
        raise Skip("torch has no SyncBatchNorm for this device")
    _compare("normed", {"ddp": {"strategy": "ddp", "sync_bn": True}}, 1e-8, precision="fp64")


def check_a_slow_worker_is_named_with_its_phase() -> None:
    world = WORLDS[0]
    for strategy in ("ddp", "horovod"):  # DDP waits for the slow worker within its backward pass
        folder = FOLDERS[0] / f"slow-{strategy}"
        train_digits(
            world, "delayed" if world.rank == 1 else "plain", folder, strategy=strategy, max_steps=120, epochs=60
        )
        if world.is_main:
            records = [each for each in read_records(folder / "metrics.jsonl") if each["kind"] == "straggler"]
            assert [(each["ranks"], each["phase"]) for each in records] == [([1], "backward")], records
    _clear_folder(world)


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # a worker's log may be written while it is removed


def main() -> int:
    backend: BackendChoice = "auto" if ON_GPU and not ON_CUDA else "gloo"  # which supports no other devices
    with connect(RankInfo.from_environment(), "gpu" if ON_GPU else "cpu", backend) as world, _folder() as folder:
        WORLDS.append(world)
        FOLDERS.append(Path(world.from_main(folder)))
        code = run_checks(dict(globals()))
        world.barrier()
        WORLDS.clear()
        return code
