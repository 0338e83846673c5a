"""Optimizers as configured."""

from __future__ import annotations

import copy

import pytest
import torch
from simulated_gpu import run_on_gpu
from torch import nn
from wide_optimizer import WideOptimizer

from lockstep.config.schema import OptimConfig
from lockstep.train.optim.build import build_optimizer, load_keeping_flags, set_rate
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
    assert isinstance(optimizer, kind)
    set_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
def test_state_from_a_checkpoint_gets_the_layout_of_its_weights(name: str) -> None:
    """A checkpoint holds it contiguously, and torch's fused steps need equal layouts."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(net, OptimConfig(optimizer=name), Strategy())  # type: ignore[arg-type]
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    values = copy.deepcopy(optimizer.state_dict())
    for entries in values["state"].values():
        entries.update((key, each.contiguous()) for key, each in entries.items() if isinstance(each, torch.Tensor))
    weight = net[0].weight
    expected = {key: each.clone() for key, each in optimizer.state[weight].items() if isinstance(each, torch.Tensor)}
    load_keeping_flags(optimizer, values)
    for key, each in expected.items():
        assert optimizer.state[weight][key].stride() == each.stride()
        assert torch.equal(optimizer.state[weight][key], each)


def _continue_on_gpu(name: str) -> tuple[list[bool | None], list[list[float]], list[list[float]]]:
    """Take a step on the CPU, and another one on both, from the state of the first."""
    first, second = _net(), _net().to("simgpu")
    config = OptimConfig(optimizer=name, lr=0.1)  # type: ignore[arg-type]
    on_cpu, on_device = (build_optimizer(net, config, Strategy()) for net in (first, second))
    fused = [optimizer.param_groups[0].get("fused") for optimizer in (on_cpu, on_device)]
    for step in range(2):
        second.load_state_dict(first.state_dict())
        if step:
            load_keeping_flags(on_device, copy.deepcopy(on_cpu.state_dict()))
            values = [value for entries in on_device.state.values() for value in entries.values()]
            devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
            assert devices == ({"simgpu", "cpu"} if name == "lamb" else {"simgpu"})  # LAMB counts on the host
        for net, optimizer in ((first, on_cpu), (second, on_device)):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
    fused.append(on_device.param_groups[0].get("fused"))
    found, expected = ([weight.flatten().tolist() for weight in net.parameters()] for net in (second, first))
    return fused, found, expected


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
def test_fused_steps_of_a_gpu_continue_from_a_cpus_state(name: str) -> None:
    fused, found, expected = run_on_gpu(_continue_on_gpu, name)
    on_device = None if name in ("lars", "lamb") else True
    assert fused == [None, on_device, on_device]
    for weight, other in zip(found, expected, strict=True):
        assert weight == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("same_dtypes", [True, False])
def test_state_keeps_its_dtypes_if_the_weights_do(same_dtypes: bool) -> None:
    weights = [nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))]
    optimizer = WideOptimizer(weights)
    weights[0].grad = torch.full_like(weights[0], 0.3)
    optimizer.step()
    load_keeping_flags(optimizer, copy.deepcopy(optimizer.state_dict()), same_dtypes=same_dtypes)
    assert optimizer.state[weights[0]]["momentum"].dtype is (torch.float32 if same_dtypes else torch.bfloat16)
