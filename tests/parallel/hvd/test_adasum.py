"""Adasum against a slow reference of arXiv 2006.02924, section 3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd


def reference(rows: list[np.ndarray]) -> np.ndarray:
    """Pairs, then pairs of pairs, in float64."""
    if len(rows) == 1:
        return rows[0]
    a, b = reference(rows[: len(rows) // 2]), reference(rows[len(rows) // 2 :])
    product, a_square, b_square = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return (1 - product / (2 * a_square) if a_square else 1) * a + (1 - product / (2 * b_square) if b_square else 1) * b


def gradient_of(rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([rank, *shape]).standard_normal(shape)


@pytest.mark.parametrize("size", [2, 4])
@on_hvd_workers("size")
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


@pytest.mark.parametrize("size", [2, 4])
@on_hvd_workers("size")
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
    hvd.shutdown()
