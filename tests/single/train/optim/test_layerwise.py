"""LARS and LAMB: one step against the papers' formulas, written out for one tensor at a time."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from lockstep.train.optim.lamb import LAMB
from lockstep.train.optim.lars import LARS


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
            assert source.grad is not None
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
            assert source.grad is not None
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
