"""The checks for NaN, and the diagnosis, in one worker."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.data.sets import Batch
from lockstep.run.replicas import are_finite
from lockstep.train.guards.nonfinite import all_finite, describe_findings, trace
from lockstep.train.precision import Precision
from lockstep.train.progress import Progress
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

WORLD = World(RankInfo(), torch.device("cpu"))


def _gradients(value: float) -> list[list[torch.Tensor]]:
    """Return lists of gradients of many kinds, whose last number is `value`."""
    plain = [torch.tensor([1e30, value], dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    wide = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    wide[1, 2, 3, 3] = value
    sparse = torch.sparse_coo_tensor([[0, 3]], [1.0, value], (5,), check_invariants=True)
    number = torch.tensor([1 + 1j, complex(0, value)])
    return [*([each] for each in plain), plain, [wide, torch.empty(0)], [sparse, torch.ones(2)], [number]]


@pytest.mark.parametrize("value", [2.0, -0.0, 1e-42, float("nan"), float("inf"), float("-inf")])
def test_one_bad_gradient_is_found_and_none_is_changed(value: float) -> None:
    for gradients, before in zip(_gradients(value), _gradients(value), strict=True):
        assert bool(all_finite(gradients)) == math.isfinite(value)
        for gradient, expected in zip(gradients, before, strict=True):
            assert gradient.layout == expected.layout
            assert torch.equal(gradient.to_dense().nan_to_num(), expected.to_dense().nan_to_num())


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_weights_of_any_layer_are_looked_at(value: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].bias[1] = value
    assert are_finite(WORLD, model) is (value == 0)
    assert are_finite(WORLD, nn.ReLU())


class Hungry(nn.Module):
    """Asks for more memory than there is."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def _job(model: nn.Module) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(seed=0),
        world=WORLD,
        network=SimpleNamespace(model=model),
        optim=SimpleNamespace(precision=Precision(), criterion=None),
        progress=Progress(),
    )


def test_a_diagnosis_for_which_there_is_no_memory_says_so() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Hungry())
    model[0].weight.grad = torch.ones(2, 2)
    passes = [Batch(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))]
    findings = trace(_job(model), passes)
    assert model[0].weight.grad is None
    assert describe_findings(findings).endswith(" ran out of memory searching for it")
    with pytest.raises(torch.OutOfMemoryError):  # the others would wait in its passes
        trace(_job(model.append(nn.SyncBatchNorm(2))), passes)
