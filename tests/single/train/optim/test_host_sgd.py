"""The direct step of SGD on a CPU: the values of torch's SGD, whose own step it leaves everything unusual to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.config.schema import OptimConfig
from lockstep.train.optim.build import build_optimizer, load_keeping_flags, set_rate
from lockstep.train.optim.host_sgd import HostSGD, _laid_out
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
    """A checkpoint holds the momentum contiguously, and the kernel reads flat memory."""
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


def _step(optimizer: torch.optim.Optimizer, net: nn.Module, step: int, is_contiguous: bool) -> None:
    _set_gradients(net, step)
    for parameter in net.parameters() if is_contiguous else ():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.contiguous()
    optimizer.step()


@pytest.mark.parametrize("first_by_torch", [True, False])
def test_gradients_and_momentum_in_another_layout_are_read_in_that_of_their_weights(first_by_torch: bool) -> None:
    ours, theirs = _net(torch.channels_last), _net(torch.channels_last)
    optimizer, usual = build_optimizer(ours, OptimConfig(), Strategy()), _torchs(theirs, OptimConfig())
    assert next(ours.parameters()).stride() != next(ours.parameters()).contiguous().stride()
    hook = optimizer.register_step_pre_hook(lambda *_: None) if first_by_torch else None
    for step in range(3):
        _step(optimizer, ours, step, is_contiguous=step < 2)
        _step(usual, theirs, step, is_contiguous=step < 2)
        if hook:
            hook.remove()  # torch's step has created momentum in the layout of the gradients
    for weight, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)


def test_strides_of_dimensions_of_size_1_are_no_other_layout() -> None:
    weight = nn.Parameter(torch.randn(6, 4, 1, 1).to(memory_format=torch.channels_last))
    gradient = torch.randn(6, 4, 1, 1)
    assert gradient.stride() != weight.stride()
    assert _laid_out(gradient, weight) is gradient


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
    with_all = register_optimizer_step_post_hook(lambda *_: seen.append("after any"))
    _train(net, optimizer, range(1))
    with_all.remove()
    assert seen[2:] == ["before", "after", "after any"]
    assert build_optimizer(_net(), OptimConfig(), Strategy()).step(lambda: 3.5) == 3.5


@pytest.mark.parametrize("settings", [{"dampening": 0.5}, {"maximize": True}])
def test_settings_that_lockstep_does_not_use_are_left_to_torch(settings: dict[str, Any]) -> None:
    ours, theirs = _net(), _net()
    kinds = {"lr": 0.1, "momentum": 0.9, **settings}
    reached = _train(ours, HostSGD(ours.parameters(), **kinds), range(3))
    expected = _train(theirs, torch.optim.SGD(theirs.parameters(), **kinds), range(3))
    assert all(map(torch.equal, reached, expected))


def test_weights_that_do_not_fill_their_memory_are_left_to_torch() -> None:
    net = _net()
    net[2].weight = nn.Parameter(torch.randn(5, 7).t())
    assert type(build_optimizer(net, OptimConfig(), Strategy())) is torch.optim.SGD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precisions_are_left_to_torch(dtype: torch.dtype) -> None:
    assert type(build_optimizer(_net().to(dtype), OptimConfig(), Strategy())) is torch.optim.SGD
