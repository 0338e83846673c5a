"""What is fused depends only on what the workers have agreed on, so that all of them fuse alike."""

from __future__ import annotations

import time

import pytest
import torch
from worker_group import on_hvd_workers

from lockstep import hvd


@on_hvd_workers(3)
def test_a_worker_that_has_joined_goes_along_with_fused_tensors() -> None:
    sizes = [3000, 5000, 7000]
    if hvd.rank() < 2:
        for turn in range(3):
            handles = [hvd.allreduce_async(torch.ones(size), name=f"{size}.{turn}", op=hvd.Sum) for size in sizes]
            for size, handle in zip(sizes, handles, strict=True):
                torch.testing.assert_close(hvd.synchronize(handle), 2 * torch.ones(size))
    assert hvd.join() >= 0


@on_hvd_workers(2)
def test_in_place_here_and_not_in_place_there_is_one_operation() -> None:
    if hvd.rank() == 1:
        time.sleep(0.05)
    tensors = [torch.ones(3000), torch.ones(4000)]
    begin = [hvd.allreduce_async, hvd.allreduce_async_] if hvd.rank() else [hvd.allreduce_async_] * 2
    handles = [
        start(tensor, name=f"{i}", op=hvd.Sum) for i, (start, tensor) in enumerate(zip(begin, tensors, strict=True))
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    torch.testing.assert_close(results, [2 * torch.ones(3000), 2 * torch.ones(4000)])
    assert (results[0] is tensors[0]) == (hvd.rank() == 0)
    assert results[1] is tensors[1]


@on_hvd_workers(2)
def test_a_group_of_one_here_and_a_tensor_there_do_not_agree() -> None:
    tensor = torch.ones(3)
    reduce = (lambda: hvd.allreduce(tensor, name="one"), lambda: hvd.grouped_allreduce([tensor], name="one"))
    with pytest.raises(hvd.HorovodInternalError, match="One rank sent a group of tensors"):
        reduce[hvd.rank()]()
