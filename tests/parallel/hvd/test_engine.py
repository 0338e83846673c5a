"""How the engine fuses, stages and packs tensors and messages does not change results."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from commands import started
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd
from lockstep.hvd.engine import fusion, transfers
from lockstep.hvd.exceptions import HorovodInternalError

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = [(3000,), (70, 50), (300_000,), (0,), (1200,)]  # of the third, only halves are small enough for the buffer


def inputs(rank: int) -> list[torch.Tensor]:
    """Return a worker's tensors, of whole numbers, which are exact in all dtypes; the last ones are not contiguous."""
    chance = np.random.default_rng(rank)
    tensors = [
        torch.from_numpy(chance.integers(-20, 20, shape)).to(dtype)
        for dtype in (*FLOATS, torch.int64, torch.bool)
        for shape in SHAPES
    ]
    wide = [torch.from_numpy(chance.integers(-20, 20, shape)).to(torch.float32) for shape in ((600_000, 2), (300, 2))]
    return [*tensors, *[one[:, 0] for one in wide]]


def reference(size: int) -> list[torch.Tensor]:
    """Return, as float64, what `values` must return."""
    stacks = [torch.stack(tensors).double() for tensors in zip(*map(inputs, range(size)), strict=True)]
    dtypes = [tensor.dtype for tensor in inputs(0)]
    averages = [
        stack.mean(0).trunc() if dtype == torch.int64 else stack.amin(0) if dtype == torch.bool else stack.mean(0)
        for stack, dtype in zip(stacks, dtypes, strict=True)
    ]
    sums = [stack.amax(0) if dtype == torch.bool else stack.sum(0) for stack, dtype in zip(stacks, dtypes, strict=True)]
    scaled = [1.5 * average for average in averages[: len(FLOATS) * len(SHAPES)]]
    return [*averages, *scaled, *sums, *averages[::4], *averages, *[stack.amax(0) for stack in stacks]]


def values(rank: int) -> list[torch.Tensor]:
    """Return the results of operations, alone and fused."""
    tensors = inputs(rank)
    floats = tensors[: len(FLOATS) * len(SHAPES)]
    return [
        *hvd.grouped_allreduce(tensors),
        *hvd.grouped_allreduce(floats, prescale_factor=0.5, postscale_factor=3),
        *hvd.grouped_allreduce(tensors, op=hvd.Sum),
        *[hvd.allreduce(tensor) for tensor in tensors[::4]],
        *hvd.grouped_allreduce_([tensor.clone() for tensor in tensors]),
        *hvd.grouped_allreduce_(tensors, op=hvd.Max),
    ]


@on_workers(2, buffer_bytes=[32 << 20, 1, 10_000])
def test_every_dtype_is_reduced_as_by_a_reference(rank: int, size: int, buffer_bytes: int) -> None:
    fusion.BUFFER_BYTES = transfers.BUFFER_BYTES = buffer_bytes
    hvd.init()
    for value, expected in zip(values(rank), reference(size), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=0, equal_nan=True)
    hvd.shutdown()


WORKER = """
import os, signal, sys
import torch.distributed as dist
from lockstep.hvd.engine.transfers import gloo_group

rank, port, trial = map(int, sys.argv[1:])
server = dist.TCPStore("127.0.0.1", port, is_master=False)

class Store(dist.Store):
    def __init__(self, prefix):
        super().__init__()
        self.prefix = prefix

    def set(self, key, value):
        server.set(self.prefix + key, value)
        if rank == 1:  # its address is known: the system accepts connections for it
            os.kill(os.getpid(), signal.SIGSTOP)

    def get(self, key):
        return server.get(self.prefix + key)

    def wait(self, keys, *timeout):
        server.wait([self.prefix + key for key in keys], *timeout)

group = gloo_group(Store(f"{trial}/"), rank, 2, 30.0, one_host=True)
os._exit(0)
"""
TRIALS = 4  # in half of them, by the order of their addresses, the first worker connects to the second


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_may_leave_before_a_peer_has_seen_the_connection(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for trial in range(TRIALS):
        commands = [[sys.executable, "-c", WORKER, str(rank), str(store.port), str(trial)] for rank in range(2)]
        with (
            started(commands[0], tmp_path, output=tmp_path / "0") as first,
            started(commands[1], tmp_path, output=tmp_path / "1") as second,
        ):
            second.wait_until(lambda second=second: second.status() == psutil.STATUS_STOPPED)
            time.sleep(0.5)  # in which the first one connects, and would leave
            os.kill(second.pid, signal.SIGCONT)
            assert second.wait(60) == 0, second.text
            assert first.wait(60) == 0, first.text


def everything(rank: int) -> list[torch.Tensor]:
    mine = torch.arange(60_000, dtype=torch.float32).view(3, -1) * (rank + 1)
    small = [torch.full((n,), float(rank + n)) for n in (3, 500)]
    given = mine.clone()
    return [
        hvd.allreduce(mine, op=hvd.Sum),
        *hvd.grouped_allreduce(small),
        hvd.allreduce(mine[:1], op=hvd.Adasum),
        hvd.broadcast(mine, 1),
        hvd.broadcast_(given, 0),
        given,
        hvd.allgather(mine[: rank + 1]),
        *hvd.alltoall(mine, splits=torch.tensor([1, 2], dtype=torch.int32)),
        hvd.reducescatter(mine),
    ]


@on_workers(2)
def test_staged_collectives_give_the_same(rank: int) -> None:
    results = []
    for way in (transfers.GlooTransfers, transfers.StagedTransfers):
        transfers.GlooTransfers = way  # type: ignore[misc]
        hvd.init()
        results.append(everything(rank))
        hvd.shutdown()
    assert all(map(torch.equal, *results))


NAMES = 200  # whose entries are longer than the 2 KiB of one exchange


@on_hvd_workers(3)
def test_workers_agree_on_messages_of_any_length(rank: int, size: int) -> None:
    def reduced(names: range, count: int) -> None:
        handles = {
            number: hvd.allreduce_async(torch.full((count,), float(number)), name=f"t{number}", op=hvd.Sum)
            for number in names
        }
        for number, handle in handles.items():
            assert hvd.synchronize(handle).tolist() == [size * number] * count

    for count in (1, 600):  # inside the message, and outside
        reduced(range(1), count)
        for names in (3, NAMES):
            reduced(range(names), count)
            reduced(range(names) if rank else range(names)[::-1], count)
    with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(torch.ones(1 + rank), name="other")
    if rank < size - 1:
        assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name="last").tolist() == [size - 1.0] * 5
    assert hvd.join() < size - 1
