"""--cuda-graph: what is refused, and that a capture leaves no traces."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import graph_standin
import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.train.fit import configure
from lockstep.train.strategies.captured_passes import CapturedPasses, check_capturable

CUDA, PLAIN = torch.device("cuda"), nn.Linear(4, 2)


@pytest.fixture(autouse=True)
def standin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph_standin.make_graphed_callables)
    graph_standin.calls.clear()


def _hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[1].register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize(
    ("settings", "device", "net", "reason"),
    [
        ({}, "cpu", PLAIN, "it needs an NVIDIA or AMD GPU, but this worker runs on cpu; leave out --cuda-graph"),
        ({"compile": True}, "cuda", PLAIN, "--compile replaces the kernels that a graph would hold; use one of them"),
        ({"strategy": "dp"}, "cuda", PLAIN, "--strategy dp copies its replicas in each step; use ddp"),
        ({"sync_bn": True}, "cuda", PLAIN, "--sync-bn waits for other workers in the forward pass; leave out --cuda"),
        ({"accumulate": 2}, "cuda", PLAIN, "with --accumulate, a graph would overwrite the gradients of the pass"),
        ({}, "cuda", _hooked(), "the hooks of layer 1 would run only once"),
    ],
)
def test_passes_that_no_graph_can_hold(settings: dict[str, Any], device: str, net: nn.Module, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_capturable(configure(cuda_graph=True, **settings), net, torch.device(device))
    assert str(raised.value).startswith(f"--cuda-graph: {reason}")


@pytest.mark.parametrize("settings", [{}, {"strategy": "ddp"}, {"strategy": "horovod"}, {"precision": "O2"}])
def test_other_passes_are_captured(settings: dict[str, Any]) -> None:
    check_capturable(configure(cuda_graph=True, **settings), PLAIN, CUDA)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def _train(replica: nn.Module, net: nn.Module, change: Callable[[int], object] = id) -> list[torch.Tensor]:
    """Take steps with batches of two sizes; return the outputs, and the state at the end."""
    generator, outputs = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for number, size in enumerate((8, 8, 3, 8)):
        change(number)
        output = replica(torch.randn(size, 4, generator=generator))
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.detach())
    net.eval()
    outputs.append(replica(torch.ones(8, 4)).detach())
    return [*outputs, *net.state_dict().values()]


def test_results_are_those_of_plain_passes() -> None:
    plain, captured = _net(), _net()
    expected = _train(plain, plain)
    found = _train(CapturedPasses(captured), captured)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert graph_standin.calls == [3], "the batch of another size and the evaluation are not replayed"


@pytest.mark.parametrize(
    ("change", "replays"),
    [
        (lambda net, number: net[1].train(number != 1), 2),
        (lambda net, number: net[0].requires_grad_(number != 0), 1),
        (lambda net, number: net[0].requires_grad_(number == 0), 1),
    ],
)
def test_pass_of_other_modes_or_parameters_is_not_replayed(change: Any, replays: int) -> None:
    plain, captured = _net(), _net()
    expected = _train(plain, plain, partial(change, plain))
    replica = CapturedPasses(captured)
    found = _train(replica, captured, partial(change, captured))
    assert all(map(torch.equal, found, expected))
    assert graph_standin.calls == [replays]


class Draws(nn.Module):
    def __init__(self, draw: Any):
        super().__init__()
        self.weight, self._draw = nn.Parameter(torch.ones(1)), draw

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._draw()
        return images * self.weight


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_random_numbers_of_the_host_are_refused(draw: Any) -> None:
    with pytest.raises(ConfigError, match="draws random numbers on the host"):
        CapturedPasses(Draws(draw))(torch.ones(2))


def test_buffer_that_the_pass_replaces_is_refused() -> None:
    net = Draws(lambda: setattr(net, "count", net.count + 1))
    net.register_buffer("count", torch.zeros(()))
    with pytest.raises(ConfigError, match="replaces a buffer in its forward pass"):
        CapturedPasses(net)(torch.ones(2))
    assert net.count == 0


def test_pass_that_needs_the_host_is_refused() -> None:
    def read() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with pytest.raises(ConfigError, match="cannot be captured: CUDA error: operation not permitted when stream is cap"):
        CapturedPasses(Draws(read))(torch.ones(2))
