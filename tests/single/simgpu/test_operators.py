"""Operations, autograd and autocast on the simulated device give the CPU's numbers, asynchronously."""

from __future__ import annotations

import threading

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus
from torch import nn

pytestmark = pytest.mark.usefixtures("simulated_gpu")


@on_gpus()
def test_backward_runs_in_a_thread_of_the_device() -> None:
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
    assert thread != threading.get_ident()
    assert index == 1
    assert is_forward_stream


@on_gpus()
def test_random_numbers_follow_the_device_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        torch.rand(1)  # the CPU's generator does not matter
        drawn.append([*torch.rand(2, device="simgpu").tolist(), *torch.randperm(5, device="simgpu").tolist()])
    state = torch.get_device_module("simgpu").get_rng_state()
    drawn.append(nn.functional.dropout(torch.ones(50, device="simgpu")).tolist())
    torch.get_device_module("simgpu").set_rng_state(state)
    drawn.append(nn.functional.dropout(torch.ones(50, device="simgpu")).tolist())
    first, again, other, dropped, dropped_again = drawn
    assert first == again != other
    assert dropped == dropped_again
    assert set(dropped) == {0, 2}


@on_gpus()
def test_mistakes_raise_at_the_call() -> None:
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
    devices, host, shape, ordinal, graph, lstm = errors
    assert "found at least two devices, simgpu:0 and simgpu:1!" in devices
    assert "found at least two devices, simgpu:0 and cpu!" in host
    assert "3" in shape
    assert "4" in shape
    assert ordinal == "simgpu error: invalid device ordinal 7"
    assert graph == "simgpu does not simulate graph capture"
    assert lstm == "simgpu does not simulate aten::_thnn_fused_lstm_cell, which has no kernel for CPUs"


@on_gpus()
def test_half_precision_layers_give_the_gradients_of_the_cpu() -> None:
    results = []
    for device in ("simgpu", "cpu"):
        values = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        normed = nn.functional.layer_norm(values.bfloat16(), [4])
        (nn.functional.mse_loss(normed.float(), values) + normed.float().square().mean()).backward()
        assert values.grad is not None
        results.append(values.grad.flatten())
    assert not [name for name in simgpu.counts() if "once" in name]
    assert results[0].tolist() == pytest.approx(results[1].tolist(), abs=0.02)


@on_gpus()
def test_operations_with_unknown_sizes_give_right_results() -> None:
    values = torch.tensor([3.0, -1.0, 2.0], device="simgpu")
    picked = torch.empty(0, device="simgpu")
    torch.masked_select(values, values > 0, out=picked)
    assert values[values > 0].tolist() == picked.tolist() == [3, 2]
    assert values.nonzero().flatten().tolist() == [0, 1, 2]
    assert values[[2, 0]].tolist() == [2, 3]
