"""Which tensors of a model are compared, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.train.guards.replica_check import FingerprintCheck, equal_tensors


def test_buffers_count_only_where_all_workers_share_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in equal_tensors(model)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [name for name, _ in equal_tensors(synchronized)][4:] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


def test_a_step_that_comes_again_is_compared_again() -> None:
    compared: list[torch.Tensor] = []

    class Alone:
        def max_(self, numbers: torch.Tensor) -> torch.Tensor:
            compared.append(numbers)
            return numbers

    world: Any = Alone()
    check = FingerprintCheck(world, nn.Linear(2, 2), every=1)
    check.check(100)
    check.check(100)
    assert len(compared) == 1
    check.forget()
    check.check(100)
    assert len(compared) == 2
