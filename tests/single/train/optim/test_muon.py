"""Muon and AdamW as one optimizer, beside torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import final_weights, losses, train_digits
from torch import nn
from worker_group import run_in_workers

from lockstep.config.schema import NumericsConfig, OptimConfig, TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.optim.build import build_optimizer
from lockstep.train.strategies import Strategy
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

with_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
CONFIG = OptimConfig(optimizer="muon", lr=0.02, weight_decay=0.1, momentum=0.95)
STEPS = 3
DIGITS: dict[str, Any] = {"optimizer": "muon", "lr": 0.01, "batch_size": 32, "epochs": 1, "log_every": 1}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))


def _set_gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))


def _train_by_torch() -> list[torch.Tensor]:
    """Take the steps of torch's own two optimizers, on the convolution as a matrix."""
    net = _net()
    weights = list(net.parameters())
    matrices = [nn.Parameter(weight.detach().flatten(1).clone()) for weight in weights if weight.ndim > 1]
    vectors = [weight for weight in weights if weight.ndim == 1]
    muon = torch.optim.Muon(matrices, 0.02, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, 0.02, (0.95, 0.999), weight_decay=0.1)
    for step in range(STEPS):
        _set_gradients(net, step)
        for matrix, weight in zip(matrices, (each for each in weights if each.ndim > 1), strict=True):
            matrix.grad = weight.grad.flatten(1)  # type: ignore[union-attr]
        muon.step()
        adamw.step()
    trained = iter(matrices)
    return [next(trained).view_as(weight) if weight.ndim > 1 else weight for weight in weights]


@with_muon
@pytest.mark.parametrize(("layout", "tolerance"), [(torch.contiguous_format, 0), (torch.channels_last, 1e-3)])
def test_steps_equal_those_of_torchs_two_optimizers(layout: torch.memory_format, tolerance: float) -> None:
    net = _net().to(memory_format=layout)
    optimizer = build_optimizer(net, CONFIG, Strategy())
    for step in range(STEPS):
        _set_gradients(net, step)
        optimizer.step()
    for found, expected in zip(net.parameters(), _train_by_torch(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert all(
        state["momentum_buffer"].stride() == weight.stride()
        for weight, state in optimizer.state.items()
        if weight.ndim > 1
    )


@with_muon
def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    sessions = [("whole", {}), ("parts", {"max_steps": 5}), ("parts", {"resume": "auto"})]
    for name, more in sessions:
        train_digits(
            World(RankInfo(), torch.device("cpu")), "lively", 320, 40, {**DIGITS, **more, "run_dir": tmp_path / name}
        )
    assert len(losses(tmp_path / "whole")) == 10
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert final_weights(tmp_path / "parts") == final_weights(tmp_path / "whole")


@with_muon
def test_sharded_steps_equal_whole_ones(tmp_path: Path) -> None:
    for name, shards in (("whole", False), ("sharded", True)):
        settings = {**DIGITS, "strategy": "ddp", "shard_optimizer": shards, "max_steps": 4, "run_dir": tmp_path / name}
        run_in_workers(2, train_digits, "plain", 160, 40, settings)
    assert final_weights(tmp_path / "sharded") == final_weights(tmp_path / "whole")


def test_older_torch_is_named_with_the_version_that_muon_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ConfigError, match=r"--optimizer muon needs torch 2.9, but this is torch 2\.\d+.*; update it"):
        build_optimizer(_net(), CONFIG, Strategy())


def test_muon_is_refused_in_fp16_alone() -> None:
    with pytest.raises(ConfigError, match="--optimizer muon keeps sums that fp16 cannot hold"):
        TrainConfig(optim=CONFIG, numerics=NumericsConfig(precision="O3"))
