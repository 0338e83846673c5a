"""SyncBatchNorm over the workers' shares of a batch is torch's batch normalization of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.world.world import World

Tensor = torch.Tensor
FEATURES = 4
# Samples on each worker; the trailing shape; arguments of the layer; dtypes of input and layer.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], torch.dtype, torch.dtype]] = {
    "even": ((4, 4, 4), (5, 6), {}, torch.float64, torch.float64),
    "uneven": ((1, 6, 2), (3, 2), {}, torch.float64, torch.float64),
    "one worker without samples": ((3, 0, 4), (3, 2), {}, torch.float64, torch.float64),
    "[batch, features]": ((3, 5, 2), (), {}, torch.float64, torch.float64),
    "3-D": ((3, 5, 2), (7,), {}, torch.float64, torch.float64),
    "5-D": ((3, 1, 2), (2, 3, 2), {}, torch.float64, torch.float64),
    "momentum None": ((2, 3, 4), (3,), {"momentum": None}, torch.float64, torch.float64),
    "momentum 0.5, eps 0.1": ((2, 3, 4), (3,), {"momentum": 0.5, "eps": 0.1}, torch.float64, torch.float64),
    "not affine": ((2, 3, 4), (3,), {"affine": False}, torch.float64, torch.float64),
    "no statistics": ((2, 3, 4), (3,), {"track_running_stats": False}, torch.float64, torch.float64),
    "neither": ((2, 3, 4), (3,), {"track_running_stats": False, "affine": False}, torch.float64, torch.float64),
    "float32": ((2, 3, 4), (8, 8), {}, torch.float32, torch.float32),
    "float16 input": ((2, 3, 4), (8, 8), {}, torch.float16, torch.float32),
    "bfloat16 input": ((2, 3, 4), (8, 8), {}, torch.bfloat16, torch.float32),
    "bfloat16": ((2, 3, 4), (8, 8), {}, torch.bfloat16, torch.bfloat16),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def layers(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[hvd.SyncBatchNorm, torch.nn.BatchNorm1d]:
    """Two layers of the same weights."""
    ours = hvd.SyncBatchNorm(FEATURES, **arguments).to(dtype)
    torch.manual_seed(1)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, 1.0)
    theirs = torch.nn.BatchNorm1d(FEATURES, **arguments).to(dtype)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs._check_input_dim = lambda input: None  # type: ignore[method-assign] # takes any number of dimensions
    return ours, theirs


def _compare(world: World, name: str) -> None:
    """Three steps in training, one in evaluation."""
    counts, trailing, arguments, dtype, layer_dtype = CASES[name]
    counts = counts[: hvd.size()]
    ours, theirs = layers(arguments, layer_dtype)
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    start = sum(counts[: hvd.rank()])
    own = slice(start, start + counts[hvd.rank()])
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        ours.train(step < 3)
        theirs.train(step < 3)
        shape = sum(counts), FEATURES, *trailing
        values, gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        whole = (3 + 2 * values).to(dtype).requires_grad_()
        share = whole.detach()[own].clone().requires_grad_()
        if step == 3 and not ours.track_running_stats:
            continue  # then the batch itself is taken, each worker's own
        expected, result = theirs(whole), ours.normalize(share)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected[own], **tolerance)
        for output, part in ((expected, gradients), (result, gradients[own])):
            output.backward(part.to(dtype))
        torch.testing.assert_close(share.grad, whole.grad[own], **tolerance)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            total = hvd.allreduce(mine.grad, op=hvd.Sum)
            loose = {key: 20 * value for key, value in tolerance.items()}  # of many samples
            torch.testing.assert_close(total, other.grad, **loose)
            mine.grad = other.grad = None
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other, **tolerance)


@on_hvd_workers(1, 2, 3, name=CASES)
def test_it_matches_batch_normalization_of_all_samples(world: World, name: str) -> None:
    _compare(world, name)


@on_hvd_workers(2)
def test_statistics_of_a_large_mean_keep_their_digits() -> None:
    layer = hvd.SyncBatchNorm(1, momentum=1.0)
    torch.manual_seed(hvd.rank())
    layer.normalize(10_000 + torch.randn(500, 1))
    assert 0.9 < layer.running_var.item() < 1.1


@on_hvd_workers(2)
def test_a_second_derivative_is_refused() -> None:
    layer = hvd.SyncBatchNorm(2)
    inputs = torch.randn(3, 2, requires_grad=True)
    (first,) = torch.autograd.grad(layer.normalize(inputs).pow(3).sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("training", [True, False])
def test_input_on_the_cpu_is_refused(training: bool) -> None:
    hvd.init()
    layer = hvd.SyncBatchNorm(2).train(training)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        layer(torch.zeros(3, 2))
    hvd.shutdown()


def test_it_is_made_like_torchs() -> None:
    layer = hvd.SyncBatchNorm(3)
    assert isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    assert (layer.eps, layer.momentum, layer.affine, layer.track_running_stats) == (1e-5, 0.1, True, True)
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        layer._check_input_dim(torch.zeros(3))
