"""Precision levels: which tensors have which dtype, how near each comes to float64, and how a loss scale behaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config.schema import NumericsConfig
from lockstep.errors import ConfigError
from lockstep.train.optim.ema import build_average
from lockstep.train.precision import FIRST, LARGEST, LossScaler, Precision, build_precision
from lockstep.world import accelerator

CUDA = torch.device("cuda", 0)
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)
    )


class Training:
    """A few steps as the training loop takes them."""

    def __init__(self, **settings: Any):
        self.precision: Precision = build_precision(NumericsConfig(**settings), torch.device("cpu"))
        self.model = self.precision.prepare(_net())
        self.weights = self.precision.weights_of(self.model)
        self.optimizer = torch.optim.SGD(self.weights.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(16, 1, 6, 6, generator=generator)
        self.labels = torch.randint(3, (16,), generator=generator)
        self.activations: list[torch.dtype] = []
        self.gradients: dict[str, torch.dtype] = {}
        for layer in (self.model[0], self.model[1], self.model[4]):
            layer.register_forward_hook(lambda _, __, output: self.activations.append(output.dtype))

    def backward(self) -> float:
        self.activations.clear()
        with self.precision.autocast():
            logits = self.model(self.images.to(self.precision.input_dtype))
            loss = F.cross_entropy(logits.to(self.precision.loss_dtype), self.labels)
        self.precision.backward(loss)
        self.gradients = {name: p.grad.dtype for name, p in self.model.named_parameters()}
        self.precision.unscale(self.optimizer)
        return loss.item()

    def step(self) -> bool:
        taken = self.precision.step(self.optimizer)
        self.model.zero_grad()
        return taken

    def train(self, steps: int) -> list[float]:
        result = []
        for _ in range(steps):
            result.append(self.backward())
            assert self.step()
        return result


@pytest.mark.parametrize(
    ("settings", "parameters", "norm", "activations", "masters"),
    [
        ({"precision": "fp32"}, SINGLE, SINGLE, (SINGLE, SINGLE, SINGLE), SINGLE),
        ({"precision": "O0"}, SINGLE, SINGLE, (SINGLE, SINGLE, SINGLE), SINGLE),
        ({"precision": "bf16"}, SINGLE, SINGLE, (torch.bfloat16,) * 3, SINGLE),
        ({"precision": "O1"}, SINGLE, SINGLE, (HALF, HALF, HALF), SINGLE),
        ({"precision": "O2"}, HALF, SINGLE, (HALF, HALF, HALF), SINGLE),
        ({"precision": "O2", "keep_batchnorm_fp32": False}, HALF, HALF, (HALF, HALF, HALF), SINGLE),
        ({"precision": "O3"}, HALF, HALF, (HALF, HALF, HALF), HALF),
        ({"precision": "O3", "keep_batchnorm_fp32": True}, HALF, SINGLE, (HALF, HALF, HALF), HALF),
        ({"precision": "fp64"}, DOUBLE, DOUBLE, (DOUBLE, DOUBLE, DOUBLE), DOUBLE),
    ],
)
def test_each_level_has_its_dtypes(
    settings: dict[str, Any],
    parameters: torch.dtype,
    norm: torch.dtype,
    activations: tuple[torch.dtype, ...],
    masters: torch.dtype,
) -> None:
    training = Training(**settings)
    training.train(2)
    of_norm = {name for name in training.gradients if name.startswith("1.")}
    for name, parameter in training.model.named_parameters():
        assert parameter.dtype == training.gradients[name] == (norm if name in of_norm else parameters), name
    assert training.model[1].running_var.dtype == norm
    assert tuple(training.activations) == activations
    for name, weight in training.weights.named_parameters():
        assert weight.dtype == (norm if name in of_norm and masters == HALF else masters), name
        assert training.optimizer.state[weight]["momentum_buffer"].dtype == weight.dtype


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"precision": "O0"}, 1e-5),
        ({"precision": "bf16"}, 0.05),
        ({"precision": "O1"}, 5e-3),
        ({"precision": "O2"}, 5e-3),
        ({"precision": "O2", "loss_scale": 128.0}, 5e-3),
        ({"precision": "O3", "loss_scale": 1024.0}, 2e-2),
    ],
)
def test_each_level_follows_float64(settings: dict[str, Any], tolerance: float) -> None:
    exact, ours = Training(precision="fp64"), Training(**settings)
    expected = exact.train(10)
    assert expected[-1] < 0.5 * expected[0]
    assert ours.train(10) == pytest.approx(expected, abs=tolerance)
    for (name, weight), reference in zip(ours.weights.named_parameters(), exact.weights.parameters(), strict=True):
        torch.testing.assert_close(weight.double(), reference, atol=2 * tolerance, rtol=0, msg=name)


def test_o1_is_what_torchs_grad_scaler_does() -> None:
    ours, theirs = Training(precision="O1"), Training(precision="fp32")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(5):
        ours.train(1)
        with torch.autocast("cpu", dtype=HALF):
            loss = F.cross_entropy(theirs.model(theirs.images).float(), theirs.labels)
        scaler.scale(loss).backward()
        scaler.step(theirs.optimizer)
        scaler.update()
        theirs.optimizer.zero_grad()
    for weight, reference in zip(ours.weights.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(weight, reference)


def test_o2_keeps_updates_that_fp16_cannot_add() -> None:
    training = Training(precision="O2")
    before = training.weights[4].weight.detach().clone()
    training.optimizer.param_groups[0]["lr"] = 1e-5
    training.train(1)
    changed = training.weights[4].weight != before
    followed = training.model[4].weight != before.half()
    assert changed.float().mean() > 0.9 > 0.1 > followed.float().mean()


def test_o2_starts_from_the_unrounded_float32_weights() -> None:
    training = Training(precision="O2")
    for weight, reference in zip(training.weights.parameters(), _net().parameters(), strict=True):
        assert torch.equal(weight, reference)


def test_after_weights_are_loaded_the_fp16_model_follows_them() -> None:
    source, target = Training(precision="O2"), Training(precision="O2")
    source.train(3)
    target.weights.load_state_dict(source.weights.state_dict())
    target.precision.refresh()
    for ours, theirs in zip(target.model.state_dict().values(), source.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_average_of_o2_weights_is_float32_and_takes_half_images() -> None:
    training = Training(precision="O2")
    average = build_average(training.model, training.weights, 0.9)
    training.train(2)
    average.update()
    logits = average.model.eval()(training.images.half())
    assert logits.dtype == SINGLE
    assert all(parameter.dtype == SINGLE for parameter in average.model.parameters())


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
def test_an_overflow_changes_nothing_but_the_scale(precision: str) -> None:
    training = Training(precision=precision, loss_scale="dynamic")
    training.precision.load_state_dict({"scale": 2.0**40, "good_steps": 7})
    before = [weight.detach().clone() for weight in training.weights.parameters()]
    training.backward()
    assert not training.step()
    assert training.precision.loss_scale == 2.0**39
    assert all(torch.equal(w, old) for w, old in zip(training.weights.parameters(), before, strict=True))
    assert not training.optimizer.state
    skipped = 0
    while not (training.backward(), training.step())[1]:
        skipped += 1
    assert 10 < skipped < 35  # it comes down to where fp16 holds the gradients


def test_a_static_scale_skips_but_stays() -> None:
    training = Training(precision="O2", loss_scale=2.0**40)
    training.backward()
    assert not training.step()
    assert training.precision.loss_scale == 2.0**40
    training.precision.load_state_dict({"scale": 4.0, "good_steps": 0})
    assert training.precision.loss_scale == 2.0**40  # the flag decides, not the checkpoint


def test_the_scale_grows_after_enough_good_steps_up_to_its_limit() -> None:
    scaler = LossScaler("dynamic")
    scaler.interval = 3
    course = []
    for finite in (True, True, False, True, True, True, True, True, True):
        scaler.unscale_([torch.ones(2) if finite else torch.tensor([1.0, float("nan")])])
        assert scaler.update() == finite
        course.append(scaler.scale / FIRST)
    assert course == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 2]
    scaler.load_state_dict({"scale": LARGEST, "good_steps": 2})
    scaler.unscale_([torch.ones(2)])
    assert scaler.update()
    assert scaler.scale == LARGEST


def test_a_scalers_state_goes_on_where_it_was() -> None:
    first, second = LossScaler("dynamic"), LossScaler("dynamic")
    first.interval = second.interval = 3
    for scaler, steps in ((first, 2), (second, 1)):
        if scaler is second:
            second.load_state_dict(first.state_dict())
        for _ in range(steps):
            scaler.unscale_([torch.ones(1)])
            scaler.update()
    assert second.scale == 2 * FIRST


def test_overflow_of_fp16_gradients_is_seen_without_their_norm() -> None:
    scaler = LossScaler(1.0)
    scaler.unscale_([torch.full((100,), 60000.0).half()])
    assert scaler.update()
    scaler.unscale_([torch.tensor([1.0, float("inf")]).half(), torch.ones(3)])
    assert not scaler.update()


@pytest.mark.parametrize("precision", ["O2", "O3"])
def test_norms_that_are_kept_do_not_go_through_fp16(precision: str) -> None:
    net = _net()
    net[1].running_var.copy_(torch.tensor([1e-9, 1e5, 1.0, 0.1]))
    exact = net[1].running_var.clone()
    level = build_precision(NumericsConfig(precision=precision, keep_batchnorm_fp32=True), torch.device("cpu"))
    assert torch.equal(level.prepare(net)[1].running_var, exact)
    assert torch.equal(level.weights_of(net)[1].running_var, exact)


def test_tf32_is_set_for_forward_and_backward_alone(accelerators: Callable[..., None]) -> None:
    accelerators(why_no_tf32="")
    seen = []

    def note(gradient: torch.Tensor) -> None:
        seen.append(torch.get_float32_matmul_precision())

    level = build_precision(NumericsConfig(precision="tf32"), CUDA)
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(note)
    with level.autocast():
        loss = weight.sum()
        note(loss)
    level.backward(loss)
    assert seen == ["high", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (torch.device("cpu"), "torch has no TF32 on CPUs"),
        (torch.device("mps"), "torch has no TF32 on Apple GPU"),
        (CUDA, "Tesla V100 has no TF32, which NVIDIA's GPUs have from Ampere on"),
    ],
)
def test_tf32_is_refused_without_the_hardware(
    device_module: Callable[..., None], device: torch.device, reason: str
) -> None:
    if device == CUDA:
        device_module(get_device_name=lambda device: "Tesla V100", is_tf32_supported=lambda: False)
    with pytest.raises(ConfigError, match=f"--precision tf32: {reason}.*; use fp32 or bf16"):
        build_precision(NumericsConfig(precision="tf32"), device)


def test_tf32_that_the_library_ignores_is_refused(
    monkeypatch: pytest.MonkeyPatch, device_module: Callable[..., None]
) -> None:
    device_module(is_tf32_supported=lambda: True)
    assert accelerator.why_no_tf32(CUDA) == ""
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    assert accelerator.why_no_tf32(CUDA) == "it needs HIPBLASLT_ALLOW_TF32=1 with this torch"


def test_fp64_is_refused_without_the_hardware() -> None:
    with pytest.raises(ConfigError, match="--precision fp64: Apple GPU has no float64; use fp32, or add --device cpu"):
        build_precision(NumericsConfig(precision="fp64"), torch.device("mps"))
