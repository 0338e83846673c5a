"""Parameters with gradients that are unique to worker, step and parameter, and their distributed optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lockstep import hvd

SHAPES = ((3, 4), (5,), (), (700,), (2, 3, 2), (0,), (30, 40))  # smaller and larger than a control message


def new_parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return parameters that are equal on all workers."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def gradient(parameter: torch.Tensor, index: int, rank: int, step: int = 0) -> torch.Tensor:
    """Return the gradient that `backward` adds."""
    generator = torch.Generator().manual_seed(1000 * step + 50 * rank + index + 1)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def backward(parameters: Iterable[torch.Tensor], rank: int, step: int = 0, left_out: Sequence[int] = ()) -> None:
    """Add this worker's gradients to all parameters except those left out."""
    terms = [
        (parameter * gradient(parameter, index, rank, step)).sum()
        for index, parameter in enumerate(parameters)
        if index not in left_out
    ]
    torch.stack(terms).sum().backward()


def mean(parameters: Iterable[torch.Tensor], ranks: Sequence[int], step: int = 0) -> list[torch.Tensor]:
    """Return the mean gradient of some workers."""
    return [
        torch.stack([gradient(parameter, index, rank, step) for rank in ranks]).mean(0)
        for index, parameter in enumerate(parameters)
    ]


def bits(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the tensors' bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def grads(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in parameters]


def wrap(parameters: Sequence[torch.Tensor], kind: Any = torch.optim.SGD, lr: float = 0.1, **arguments: Any) -> Any:
    """Return a `DistributedOptimizer` for the parameters."""
    return hvd.DistributedOptimizer(kind(parameters, lr=lr), **arguments)


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Assert that nested tensors are equal up to a tolerance, by default that of float64 sums in another order."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
