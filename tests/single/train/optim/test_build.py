"""Optimizers by their settings: frozen parameters, and rates by layer."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from runs import weights_of
from separable import separable
from simulated_gpu import run_on_gpu
from torch import nn
from wide_optimizer import WideOptimizer

from lockstep.config.schema import OptimConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.optimizer_state import load_keeping_flags
from lockstep.train import fit
from lockstep.train.optim.build import build_optimizer, describe_frozen, freeze, set_rate
from lockstep.train.optim.lamb import LAMB
from lockstep.train.optim.lars import LARS
from lockstep.train.strategies import Strategy

COUNT_ON_HOST = ("lamb", "muon")  # for the bias correction
NAMES = ["sgd", "adam", "adamw", "lars", "lamb", *(["muon"] if hasattr(torch.optim, "Muon") else [])]


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


@pytest.mark.parametrize("name", NAMES)
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
            assert devices == ({"simgpu", "cpu"} if name in COUNT_ON_HOST else {"simgpu"})
        for net, optimizer in ((first, on_cpu), (second, on_device)):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
    fused.append(on_device.param_groups[0].get("fused"))
    found, expected = ([weight.flatten().tolist() for weight in net.parameters()] for net in (second, first))
    return fused, found, expected


@pytest.mark.usefixtures("simulated_gpu")
@pytest.mark.parametrize("name", NAMES)
def test_fused_steps_of_a_gpu_continue_from_a_cpus_state(name: str) -> None:
    fused, found, expected = run_on_gpu(_continue_on_gpu, name)
    on_device = True if name in ("sgd", "adam", "adamw") else None
    assert fused == [None, on_device, on_device]
    for weight, other in zip(found, expected, strict=True):
        rel = 1e-2 if name == "muon" else 1e-5  # Muon computes in bfloat16
        assert weight == pytest.approx(other, rel=rel, abs=1e-6)


@pytest.mark.parametrize("same_dtypes", [True, False])
def test_state_keeps_its_dtypes_if_the_weights_do(same_dtypes: bool) -> None:
    weights = [nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))]
    optimizer = WideOptimizer(weights)
    weights[0].grad = torch.full_like(weights[0], 0.3)
    optimizer.step()
    load_keeping_flags(optimizer, copy.deepcopy(optimizer.state_dict()), same_dtypes=same_dtypes)
    assert optimizer.state[weights[0]]["momentum"].dtype is (torch.float32 if same_dtypes else torch.bfloat16)


def _net_to_freeze() -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return nn.ModuleDict({"layer1": block, "layer10": nn.Conv2d(4, 4, 1), "head": nn.Linear(4, 3)})


@pytest.mark.parametrize(
    ("patterns", "frozen", "norms"),
    [
        ((), [], 0),
        (("layer1",), ["layer1.0.weight", "layer1.0.bias", "layer1.1.weight", "layer1.1.bias"], 1),
        (("layer1.0.*", "head.bias"), ["layer1.0.weight", "layer1.0.bias", "head.bias"], 0),
        (("layer*.weight",), ["layer1.0.weight", "layer1.1.weight", "layer10.weight"], 1),
    ],
)
def test_patterns_are_names_of_modules_or_globs(patterns: tuple[str, ...], frozen: list[str], norms: int) -> None:
    model = _net_to_freeze()
    assert len(freeze(model, patterns)) == norms
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


def test_pattern_without_match_lists_the_parameter_names() -> None:
    with pytest.raises(
        ConfigError, match=r"--freeze xyz: no parameter .*; the model's modules are layer1, layer10, head"
    ):
        freeze(_net_to_freeze(), ["head", "xyz"])
    with pytest.raises(ConfigError, match=r"--freeze layer1\.1\.wight: .*did you mean layer1\.1\.weight"):
        freeze(_net_to_freeze(), ["layer1.1.wight"])


def test_it_reports_how_many_parameters_train() -> None:
    model = _net_to_freeze()
    assert describe_frozen(model) == []
    freeze(model, ["layer1", "layer10"])
    assert describe_frozen(model) == ["training 15 of 155 parameters; 6 of 8 tensors are frozen"]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(images)))  # type: ignore[no-any-return]


def test_only_frozen_batch_norms_keep_their_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = {"epochs": 2, "batch_size": 16, "loader_workers": 0, "track": (), "lr": 0.05}
    fit(model, separable(64, 1), separable(32, 2), freeze="backbone", run_dir=tmp_path, **settings)
    same = {name for name, value in weights_of(tmp_path).items() if torch.equal(value, before[name])}
    assert same == {name for name in before if name.startswith("backbone.")}
    assert "training 163 of 403 parameters; 4 of 8 tensors are frozen" in capsys.readouterr().out


def test_a_run_with_other_frozen_parameters_does_not_go_on(tmp_path: Path) -> None:
    settings = {"batch_size": 16, "loader_workers": 0, "track": (), "run_dir": tmp_path, "resume": "auto"}
    fit(Classifier(), separable(64, 1), separable(32, 2), freeze=["backbone"], epochs=1, **settings)
    with pytest.raises(CheckpointError, match=r"with --freeze \['backbone'\], not \[\]"):
        fit(Classifier(), separable(64, 1), separable(32, 2), epochs=2, **settings)
    assert fit(Classifier(), separable(64, 1), separable(32, 2), freeze=["backbone"], epochs=2, **settings).steps == 8


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 3), (5,), (2, 3, 2, 2)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return [*weights, torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)]


def _set_gradients(weights: list[torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(10 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)


def test_lars_takes_the_papers_steps() -> None:
    ours, reference = _weights(), [weight.detach().clone() for weight in _weights()]
    optimizer = LARS(ours, lr=2.0, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02)
    buffers = [torch.zeros_like(weight) for weight in reference]
    for step in range(3):
        _set_gradients(ours, step)
        optimizer.step()
        for weight, buffer, source in zip(reference, buffers, ours, strict=True):
            length, slope = weight.norm(), source.grad.norm()
            trust = 0.02 * length / (slope + 0.01 * length) if weight.ndim > 1 and length > 0 else 1.0
            buffer.mul_(0.9).add_(2.0 * trust * (source.grad + 0.01 * weight))
            weight.sub_(buffer)
        for weight, expected in zip(ours, reference, strict=True):
            torch.testing.assert_close(weight.detach(), expected)


def test_lamb_takes_the_papers_steps() -> None:
    ours, reference = _weights(), [weight.detach().clone() for weight in _weights()]
    optimizer = LAMB(ours, lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02)
    means = [torch.zeros_like(weight) for weight in reference]
    squares = [torch.zeros_like(weight) for weight in reference]
    for step in range(1, 4):
        _set_gradients(ours, step)
        optimizer.step()
        for weight, mean, square, source in zip(reference, means, squares, ours, strict=True):
            mean.mul_(0.8).add_(0.2 * source.grad)
            square.mul_(0.95).add_(0.05 * source.grad**2)
            corrected = mean / (1 - 0.8**step) / ((square / (1 - 0.95**step)).sqrt() + 1e-3)
            update = corrected + 0.02 * weight
            ratio = weight.norm() / update.norm() if weight.ndim > 1 and weight.norm() > 0 else 1.0
            weight.sub_(0.1 * ratio * update)
        for weight, expected in zip(ours, reference, strict=True):
            torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_closure_steps_and_restored_state_continue_alike(kind: type[LARS] | type[LAMB]) -> None:
    first, second = _weights(), _weights()
    one, other = kind(first, lr=0.1), kind(second, lr=0.1)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                for target, source in zip(second, first, strict=True):
                    target.copy_(source)
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        if step >= 2:
            _set_gradients(second, step)
            other.step()
        _set_gradients(first, step)
        assert one.step(lambda: math.pi) == math.pi
    for weight, expected in zip(second, first, strict=True):
        assert torch.equal(weight, expected)


def test_parameters_without_a_gradient_stay() -> None:
    weights = _weights()
    weights[0].grad = torch.ones_like(weights[0])
    before = [weight.detach().clone() for weight in weights]
    for kind in (LARS, LAMB):
        kind(weights, lr=0.1).step()
    assert not torch.equal(weights[0], before[0])
    assert all(torch.equal(weight, old) for weight, old in zip(weights[1:], before[1:], strict=True))
