"""The direct step of SGD on a CPU: the values of torch's SGD, whose own step it leaves everything unusual to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config.schema import OptimConfig
from lockstep.train.optim.build import build_optimizer, load_keeping_flags, set_rate
from lockstep.train.optim.host_sgd import HostSGD
from lockstep.train.strategies import Strategy


def _net(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 7), nn.Linear(7, 2))
    return net.to(memory_format=memory_format)


def _set_gradients(net: nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in net.parameters():
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=random))


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    for step in steps:
        set_rate(optimizer, 0.1 / (step + 1))
        _set_gradients(net, step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def _torchs(net: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return torch's own SGD with the same settings."""
    ours = build_optimizer(net, config, Strategy())
    settings = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov and config.momentum > 0}
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in ours.param_groups]
    return torch.optim.SGD(groups, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.0}, {"nesterov": True}, {"decay_all": False}])
def test_a_step_has_the_values_of_torchs(settings: dict[str, Any], dtype: torch.dtype) -> None:
    config = OptimConfig(weight_decay=0.1, **{"nesterov": False, **settings})
    ours, theirs = _net().to(dtype), _net().to(dtype)
    optimizer = build_optimizer(ours, config, Strategy())
    assert type(optimizer) is HostSGD
    reached = _train(ours, optimizer, range(4))
    for weight, expected in zip(reached, _train(theirs, _torchs(theirs, config), range(4)), strict=True):
        torch.testing.assert_close(weight, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_a_parameter_without_a_gradient_is_left_alone_and_starts_later() -> None:
    net = _net()
    optimizer = build_optimizer(net, OptimConfig(), Strategy())
    weight = next(net.parameters())
    before = weight.detach().clone()
    _set_gradients(net, 0)
    weight.grad = None
    optimizer.step()
    assert torch.equal(weight, before)
    assert weight not in optimizer.state
    _train(net, optimizer, range(1))
    assert not torch.equal(weight, before)


def test_a_resumed_channels_last_job_continues_as_if_uninterrupted() -> None:
    """A checkpoint holds the momentum contiguously, and the kernel reads memory in order."""
    config, whole = OptimConfig(), _net(torch.channels_last)
    optimizer = build_optimizer(whole, config, Strategy())
    _train(whole, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["momentum_buffer"] = entries["momentum_buffer"].contiguous()
    resumed = copy.deepcopy(whole)
    again = build_optimizer(resumed, config, Strategy())
    load_keeping_flags(again, state)
    for parameter in resumed.parameters():
        assert again.state[parameter]["momentum_buffer"].stride() == parameter.stride()
    for weight, expected in zip(
        _train(resumed, again, range(2, 4)), _train(whole, optimizer, range(2, 4)), strict=True
    ):
        assert torch.equal(weight, expected)


def test_a_gradient_in_another_layout_is_left_to_torch() -> None:
    ours, theirs = _net(torch.channels_last), _net(torch.channels_last)
    for net, optimizer in (
        (ours, build_optimizer(ours, OptimConfig(), Strategy())),
        (theirs, _torchs(theirs, OptimConfig())),
    ):
        _set_gradients(net, 0)
        weight = next(net.parameters())
        assert weight.grad is not None
        weight.grad = weight.grad.contiguous()
        assert weight.grad.stride() != weight.stride()
        optimizer.step()
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_a_sparse_gradient_is_left_to_torch() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = build_optimizer(table, OptimConfig(momentum=0.0, nesterov=False, weight_decay=0.0, lr=1.0), Strategy())
    before = table.weight.detach().clone()
    table(torch.tensor([2, 2])).sum().backward()
    optimizer.step()
    before[2] -= 2
    torch.testing.assert_close(table.weight.detach(), before)


def test_hooks_and_closures_still_run() -> None:
    net, seen = _net(), list[str]()
    optimizer = build_optimizer(net, OptimConfig(), Strategy())
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    _train(net, optimizer, range(1))
    assert seen == ["before", "after"]
    assert build_optimizer(_net(), OptimConfig(), Strategy()).step(lambda: 3.5) == 3.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precisions_are_left_to_torch(dtype: torch.dtype) -> None:
    assert type(build_optimizer(_net().to(dtype), OptimConfig(), Strategy())) is torch.optim.SGD
