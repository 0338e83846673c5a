"""The trainer on simulated GPUs (tests/simgpu): every step as on a CPU, and no wait that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import graph_standin
import pytest
import simgpu
import torch
from runs import final_weights, losses, train_digits
from safetensors.torch import load_file
from simulated_gpu import gpu_world, run_on_gpu, run_on_gpus
from worker_group import run_in_workers

from lockstep.train import setup
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
SLOW_US = 20_000  # for each copy: the host takes several steps while a checkpoint is copied
COMMON = {"max_steps": 8, "epochs": 6, "batch_size": 32, "log_every": 1, "lr": 0.01}
SETTINGS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "fp64": ("normed", 1e-9, {"precision": "fp64"}),
    "accumulation, clipping and averaged weights": (
        "plain", 1e-9, {"precision": "fp64", "accumulate": 2, "clip_norm": 0.5, "ema_decay": 0.9},
    ),
    "LAMB": ("normed", 1e-9, {"precision": "fp64", "optimizer": "lamb"}),
    "LARS": ("normed", 1e-9, {"precision": "fp64", "optimizer": "lars"}),
    "AdamW and channels_last": ("deep", 1e-9, {"precision": "fp64", "optimizer": "adamw", "channels_last": True}),
    "O1": ("normed", 2e-2, {"precision": "O1"}),
    "O2": ("normed", 2e-2, {"precision": "O2"}),
    "O3": ("plain", 2e-2, {"precision": "O3"}),
    "bf16": ("normed", 5e-2, {"precision": "bf16"}),
}  # fmt: skip


def _train_each(world: World, folder: Path) -> None:
    for name, (net, _, settings) in SETTINGS.items():
        train_digits(world, net, 200, 100, {**COMMON, **settings, "run_dir": folder / name})


def _train_each_on_a_gpu(folder: Path) -> int:
    simgpu.delays(seed=1, copy_us=500, operation_us=20)
    _train_each(World(RankInfo(), GPU), folder)
    return simgpu.counts().get("failed operations", 0)


TOGETHER: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("plain", {"strategy": "ddp", "accumulate": 2}),
    "horovod": ("plain", {"strategy": "horovod", "clip_norm": 0.5}),
    "sharded optimizer": ("plain", {"strategy": "ddp", "optimizer": "adamw", "shard_optimizer": True}),
    "PowerSGD": ("plain", {"strategy": "ddp", "compress": "powersgd"}),
    "synchronized batch norm": ("normed", {"strategy": "horovod", "sync_bn": True}),
}


def test_losses_are_those_of_a_cpu(tmp_path: Path) -> None:
    assert run_on_gpu(_train_each_on_a_gpu, tmp_path / "gpu") == 0
    run_in_workers(1, _train_each, tmp_path / "cpu")
    for name, (_, tolerance, _) in SETTINGS.items():
        expected = losses(tmp_path / "cpu" / name)
        assert len(expected) == COMMON["max_steps"]
        assert losses(tmp_path / "gpu" / name) == pytest.approx(expected, rel=tolerance), name


def _train_in_both(folder: Path) -> str:
    for precision in ("fp32", "tf32"):
        train_digits(
            World(RankInfo(), GPU), "plain", 200, 100, {**COMMON, "precision": precision, "run_dir": folder / precision}
        )
    return torch.get_float32_matmul_precision()


def test_tf32_trains_as_fp32(tmp_path: Path) -> None:
    assert run_on_gpu(_train_in_both, tmp_path) == "highest"
    assert losses(tmp_path / "tf32") == pytest.approx(losses(tmp_path / "fp32"), rel=2e-2)


def _train_together(world: World, folder: Path) -> None:
    for name, (net, settings) in TOGETHER.items():
        train_digits(world, net, 200, 100, {**COMMON, "precision": "fp64", **settings, "run_dir": folder / name})


def _train_together_on_gpus(_: World, folder: Path) -> tuple[set[int], dict[str, int]]:
    simgpu.delays(seed=1, copy_us=200, operation_us=20, collective_us=500)
    with gpu_world() as world:
        _train_together(world, folder)
    return simgpu.contexts(), dict(simgpu.counts())


def test_two_gpus_train_as_two_cpus(tmp_path: Path) -> None:
    outcomes = run_on_gpus(2, _train_together_on_gpus, tmp_path / "gpu")
    run_in_workers(2, _train_together, tmp_path / "cpu")
    for name in TOGETHER:
        assert losses(tmp_path / "gpu" / name) == pytest.approx(losses(tmp_path / "cpu" / name), rel=1e-9), name
    assert [contexts for contexts, _ in outcomes] == [{0}, {1}]
    assert all(counts["collectives"] >= len(TOGETHER) * COMMON["max_steps"] for _, counts in outcomes)
    assert not any(counts.get("failed operations") for _, counts in outcomes)


def _train_with_checkpoints(folder: Path) -> None:
    settings = {**COMMON, "max_steps": 6, "checkpoint_steps": 2, "keep": 3, "optimizer": "lamb", "ema_decay": 0.5}
    for copy_us in (0, SLOW_US):
        simgpu.delays(copy_us=copy_us)
        train_digits(World(RankInfo(), GPU), "normed", 200, 32, {**settings, "run_dir": folder / str(copy_us)})


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all checkpoints."""
    files = sorted((run / "checkpoints").glob("step-*/*.safetensors"))
    return {
        f"{file.parent.name} {file.name} {name}": value for file in files for name, value in load_file(file).items()
    }


def test_slow_copies_do_not_change_checkpoints(tmp_path: Path) -> None:
    run_on_gpu(_train_with_checkpoints, tmp_path)
    found, expected = _tensors(tmp_path / str(SLOW_US)), _tensors(tmp_path / "0")
    assert {name.split()[0] for name in expected} == {"step-00000002", "step-00000004", "step-00000006"}
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


def _train_with_and_without_graphs(_: World, folder: Path, strategy: str, precision: str) -> list[int]:
    setup.check_capturable = lambda *_: None  # type: ignore[assignment]  # the simulated device has no graphs
    torch.cuda.make_graphed_callables = graph_standin.make_graphed_callables  # type: ignore[assignment]
    simgpu.delays(seed=1, copy_us=500, operation_us=20)
    settings = {**COMMON, "strategy": strategy, "precision": precision}
    with gpu_world() as world:
        for name, cuda_graph in (("plain", False), ("graph", True)):
            own = {**settings, "cuda_graph": cuda_graph, "run_dir": folder / name}
            train_digits(world, "lively", 200, 100, own)
    return graph_standin.calls


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "bf16"), ("horovod", "O2")])
def test_captured_passes_have_the_bits_of_plain_ones(tmp_path: Path, strategy: str, precision: str) -> None:
    replays = run_on_gpus(2, _train_with_and_without_graphs, tmp_path, strategy, precision)
    assert all(count > 5 for (count,) in replays), replays
    assert losses(tmp_path / "graph") == losses(tmp_path / "plain")
    assert final_weights(tmp_path / "graph") == final_weights(tmp_path / "plain")
