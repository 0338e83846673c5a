"""Optimizers as configured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.config import OptimConfig
from lockstep.train.optim import build_optimizer, set_rate
from lockstep.train.strategies import Strategy


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_norms_and_biases_are_spared_on_request() -> None:
    decayed, spared = build_optimizer(_net(), OptimConfig(weight_decay=0.1, decay_all=False), Strategy()).param_groups
    assert [parameter.ndim for parameter in decayed["params"]] == [4, 2]
    assert decayed["weight_decay"] == 0.1
    assert {parameter.ndim for parameter in spared["params"]} == {1}
    assert spared["weight_decay"] == 0
    (everything,) = build_optimizer(_net(), OptimConfig(weight_decay=0.1), Strategy()).param_groups
    assert len(everything["params"]) == 6


def test_frozen_parameters_are_left_alone() -> None:
    net = _net()
    net[0].requires_grad_(False)
    assert sum(len(group["params"]) for group in build_optimizer(net, OptimConfig(), Strategy()).param_groups) == 4


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_each_kind_takes_the_rate_of_the_step(name: str, kind: type) -> None:
    optimizer = build_optimizer(_net(), OptimConfig(optimizer=name), Strategy())  # type: ignore[arg-type]
    assert type(optimizer) is kind
    set_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
