"""Adasum against a slow reference of arXiv 2006.02924, section 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gradients import backward, bits, gradient, new_parameters
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd


def reference(rows: Any) -> Any:
    """Combine pairs, then pairs of pairs, of arrays or tensors in float64."""
    if len(rows) == 1:
        return rows[0]
    a, b = reference(rows[: len(rows) // 2]), reference(rows[len(rows) // 2 :])
    product, a_square, b_square = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return (1 - product / (2 * a_square) if a_square else 1) * a + (1 - product / (2 * b_square) if b_square else 1) * b


def gradient_of(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).standard_normal(shape)


@on_hvd_workers(2, 4)
def test_adasum_is_the_papers(size: int) -> None:
    tolerances = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3}
    for shape in ((1,), (5,), (4, 3), (1000,), (400_000,)):
        for dtype, tolerance in tolerances.items():
            rows = [gradient_of(rank, shape) for rank in range(size)]
            mine = torch.from_numpy(rows[hvd.rank()]).to(dtype)
            before = mine.clone()
            result = hvd.allreduce(mine, op=hvd.Adasum)
            np.testing.assert_allclose(result.double().numpy(), reference(rows), rtol=tolerance, atol=4 * tolerance)
            assert mine.equal(before)
            assert result.dtype == dtype
            assert hvd.broadcast(result, 0).equal(result), "the same bits on all workers"
    rows = [gradient_of(rank, (6, 2)) for rank in range(size)]
    mine = torch.from_numpy(rows[hvd.rank()].copy())
    transposed = hvd.allreduce(mine.t(), op=hvd.Adasum)
    np.testing.assert_allclose(transposed.numpy(), reference(rows).T)
    first, second = hvd.grouped_allreduce([mine, 2 * mine], op=hvd.Adasum)
    np.testing.assert_allclose(first.numpy(), reference(rows))
    np.testing.assert_allclose(second.numpy(), 2 * reference(rows))
    assert hvd.allreduce_(mine, op=hvd.Adasum) is mine
    np.testing.assert_allclose(mine.numpy(), reference(rows))


@on_hvd_workers(2, 4)
def test_adasum_adds_orthogonal_and_averages_parallel_gradients(size: int) -> None:
    rank = hvd.rank()
    own_axis = torch.eye(size)[rank] * (rank + 1)
    assert hvd.allreduce(own_axis, op=hvd.Adasum).tolist() == [rank + 1.0 for rank in range(size)]
    same = torch.tensor([3.0, -1.0])
    assert hvd.allreduce(same, op=hvd.Adasum).tolist() == same.tolist()
    assert hvd.allreduce(same * (rank == 0), op=hvd.Adasum).tolist() == same.tolist(), "the others have zeros"
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3
    assert hvd.allreduce(same, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=3.0).tolist() == [18.0, -6.0]


@on_workers(3)
def test_adasum_needs_all_workers_and_a_power_of_two() -> None:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    for process_set in (hvd.global_process_set, pair):
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=process_set)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)]), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match="power of 2"):
        optimizer.step()
    hvd.shutdown()


@on_hvd_workers(2, 4)
def test_adasum_combines_the_workers_steps(size: int) -> str:
    parameters = new_parameters()
    users = torch.optim.SGD(parameters, lr=0.5)
    optimizer: Any = hvd.DistributedOptimizer(users, list(zip("abcdefg", parameters, strict=True)), op=hvd.Adasum)
    for step in range(3):
        optimizer.zero_grad()
        starts = [parameter.detach().clone() for parameter in parameters]
        left_out = [2] if hvd.rank() else []
        backward(parameters, hvd.rank(), step, left_out)
        optimizer.synchronize()
        optimizer.step()
        for index, (parameter, start) in enumerate(zip(parameters, starts, strict=True)):
            changes = [-0.5 * gradient(parameter, index, rank, step) for rank in range(size)]
            changes = [change * (index != 2 or rank == 0) for rank, change in enumerate(changes)]
            torch.testing.assert_close(parameter.detach(), start + reference(changes), rtol=1e-12, atol=1e-12)
    with pytest.raises(AssertionError, match="not supported when using Adasum"):
        optimizer.skip_synchronize()
    return bits(parameters)


@on_hvd_workers(2)
def test_adasum_takes_compression_and_steps_of_any_optimizer() -> str:
    parameters = new_parameters()
    users = torch.optim.Adam(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(users, 1, 0.5)
    optimizer: Any = hvd.DistributedOptimizer(users, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert isinstance(optimizer, torch.optim.Adam)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, 0, step)  # the same everywhere, so that the step is one worker's own
        optimizer.step()
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01 / 8
    return bits(parameters)
