"""Memory that batches use again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.data.pipeline.buffers import BATCHES_UNDER_WAY, BufferPool, SharedRing


def test_memory_is_reused_once_nothing_holds_it() -> None:
    pool = BufferPool()
    first = pool.take((4, 5), torch.float32)
    place = first.data_ptr()
    assert pool.take((4, 5), torch.float32).data_ptr() != place
    view = first[1:, 2]
    del first
    assert pool.take((4, 5), torch.float32).data_ptr() != place  # the view's storage is the same
    del view
    smaller = pool.take((2, 3), torch.bfloat16)
    assert smaller.data_ptr() == place
    assert (smaller.shape, smaller.dtype) == ((2, 3), torch.bfloat16)


def test_memory_that_a_backward_pass_needs_is_held() -> None:
    pool = BufferPool()
    images = pool.take((3,), torch.float32).fill_(2)
    weights = torch.ones(3, requires_grad=True)
    loss = (weights * images).sum()
    del images
    pool.take((3,), torch.float32).fill_(7)
    loss.backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [2, 2, 2]


def test_a_pool_keeps_no_more_blocks_than_were_in_use_at_once() -> None:
    pool = BufferPool()
    places = {pool.take((size,), torch.uint8).data_ptr() for size in [100] * 50}
    assert len(places) == 1
    for size in range(1, 50):
        pool.take((100 + size,), torch.uint8)
    assert len(pool._blocks) == 1
    assert pool.take((0, 3), torch.float32).shape == (0, 3)


class _Counting:
    """Batch number n is full of n's."""

    def __init__(self) -> None:
        self._ring = SharedRing()

    def __getitems__(self, numbers: list[int]) -> torch.Tensor:
        assert not self._ring._buffers or all(buffer.is_shared() for buffer in self._ring._buffers)
        return self._ring.take((1000, 1000 + numbers[0] % 3)).fill_(numbers[0])


class _OneByOne:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[number] for number in range(40)])

    def __len__(self) -> int:
        return 40


def _as_it_is(batch: torch.Tensor) -> torch.Tensor:
    return batch


@pytest.mark.parametrize("processes", [0, 1, 2])
def test_a_batch_stays_as_it_is_until_the_next_one_is_asked_for(processes: int) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(
        _Counting(),  # type: ignore[arg-type]
        batch_sampler=_OneByOne(),  # type: ignore[arg-type]
        num_workers=processes,
        collate_fn=_as_it_is,  # type: ignore[arg-type]
    )
    places = set()
    for number, batch in enumerate(loader):
        assert batch.shape == (1000, 1000 + number % 3)
        assert np.unique(batch.numpy()).tolist() == [number]
        places.add(batch.data_ptr())
    if processes:
        assert len(places) <= 3 * processes * BATCHES_UNDER_WAY  # three sizes, each with a new ring at most
