"""What goes through the host's memory arrives as what goes there directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.engine import connections, transfers
from lockstep.world.world import World


def _everything(world: World, staged: bool) -> list[Any]:
    if staged:
        connections.GlooTransfers = transfers.StagedTransfers  # type: ignore[misc]
    hvd.init()
    mine = torch.arange(60_000, dtype=torch.float32).view(3, -1) * (world.rank + 1)
    small = [torch.full((n,), float(world.rank + n)) for n in (3, 500)]
    given = mine.clone()
    results = [
        hvd.allreduce(mine, op=hvd.Sum),
        *hvd.grouped_allreduce(small),
        hvd.allreduce(mine[:1], op=hvd.Adasum),
        hvd.broadcast(mine, 1),
        hvd.broadcast_(given, 0),
        given,
        hvd.allgather(mine[: world.rank + 1]),
        *hvd.alltoall(mine, splits=torch.tensor([1, 2], dtype=torch.int32)),
        hvd.reducescatter(mine),
    ]
    hvd.shutdown()
    return [result.numpy() for result in results]


def test_all_collectives_give_the_same() -> None:
    direct, staged = (run_in_workers(2, _everything, through_host) for through_host in (False, True))
    for rank in range(2):
        for expected, result in zip(direct[rank], staged[rank], strict=True):
            np.testing.assert_array_equal(result, expected)
