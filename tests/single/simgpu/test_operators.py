"""Operations, autograd and autocast on the simulated device give the CPU's numbers, asynchronously."""

from __future__ import annotations

import threading

import pytest
import simgpu
import torch
from simulated_gpu import run_on_gpu
from torch import nn

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _model() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(72, 5))


def _threads_of_backward() -> tuple[bool, int, int]:
    device = torch.device("simgpu", 1)
    weight = torch.ones(2, device=device, requires_grad=True)
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    seen = []

    def note(_: torch.Tensor) -> None:
        current = torch.accelerator.current_stream(device)
        seen.append((threading.get_ident(), torch.accelerator.current_device_index(), current == stream))

    weight.register_hook(note)
    with stream:
        loss = (weight * 2).sum()
    loss.backward()
    ((thread, index, is_forward_stream),) = seen
    return thread != threading.get_ident(), index, is_forward_stream


def test_backward_runs_in_a_thread_of_the_device() -> None:
    assert run_on_gpu(_threads_of_backward) == (True, 1, True)


def _random_numbers() -> list[list[float]]:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        torch.rand(1)  # the CPU's generator does not matter
        drawn.append([*torch.rand(2, device="simgpu").tolist(), *torch.randperm(5, device="simgpu").tolist()])
    state = torch.get_device_module("simgpu").get_rng_state()
    drawn.append(nn.functional.dropout(torch.ones(50, device="simgpu")).tolist())
    torch.get_device_module("simgpu").set_rng_state(state)
    drawn.append(nn.functional.dropout(torch.ones(50, device="simgpu")).tolist())
    return drawn


def test_random_numbers_follow_the_device_seed() -> None:
    first, again, other, dropped, dropped_again = run_on_gpu(_random_numbers)
    assert first == again != other
    assert dropped == dropped_again
    assert set(dropped) == {0, 2}


def _mistakes() -> list[str]:
    on_first, on_second = torch.ones(3, device="simgpu:0"), torch.ones(3, device="simgpu:1")
    errors = []
    for mistake in (
        lambda: on_first + on_second,
        lambda: on_first + torch.ones(3),
        lambda: on_first @ torch.ones(4, 2, device="simgpu"),
        lambda: torch.ones(1, device="simgpu:7"),
        lambda: torch.get_device_module("simgpu").graph(),
        lambda: nn.LSTM(2, 2).to("simgpu")(torch.ones(1, 1, 2, device="simgpu")),
    ):
        try:
            mistake()
            errors.append("none")
        except (RuntimeError, NotImplementedError) as error:
            errors.append(str(error).splitlines()[0])
    torch.accelerator.synchronize()
    return errors


def test_mistakes_raise_at_the_call() -> None:
    devices, host, shape, ordinal, graph, lstm = run_on_gpu(_mistakes)
    assert "found at least two devices, simgpu:0 and simgpu:1!" in devices
    assert "found at least two devices, simgpu:0 and cpu!" in host
    assert "3" in shape
    assert "4" in shape
    assert ordinal == "simgpu error: invalid device ordinal 7"
    assert graph == "simgpu does not simulate graph capture"
    assert lstm == "simgpu does not simulate aten::_thnn_fused_lstm_cell, which has no kernel for CPUs"


def _mixed_layers() -> tuple[list[float], list[float], list[str]]:
    results = []
    for device in ("simgpu", "cpu"):
        values = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        normed = nn.functional.layer_norm(values.bfloat16(), [4])
        (nn.functional.mse_loss(normed.float(), values) + normed.float().square().mean()).backward()
        assert values.grad is not None
        results.append(values.grad.flatten())
    at_once = [name for name in simgpu.counts() if "once" in name]
    return results[0].tolist(), results[1].tolist(), at_once


def test_half_precision_layers_give_the_gradients_of_the_cpu() -> None:
    on_device, on_cpu, at_once = run_on_gpu(_mixed_layers)
    assert on_device == pytest.approx(on_cpu, abs=0.02)
    assert not at_once


def _data_dependent_results() -> list[list[float]]:
    values = torch.tensor([3.0, -1.0, 2.0], device="simgpu")
    picked = torch.empty(0, device="simgpu")
    torch.masked_select(values, values > 0, out=picked)
    return [values[values > 0].tolist(), values.nonzero().flatten().tolist(), picked.tolist(), values[[2, 0]].tolist()]


def test_operations_with_unknown_sizes_give_right_results() -> None:
    assert run_on_gpu(_data_dependent_results) == [[3, 2], [0, 1, 2], [3, 2], [2, 3]]
