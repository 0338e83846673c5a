"""How the engine fuses, stages and packs tensors and messages does not change results."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from commands import started
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.engine import fusion, transfers
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world.world import World

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
    """Return, as float64, what `_values` must return."""
    stacks = [torch.stack(tensors).double() for tensors in zip(*map(inputs, range(size)), strict=True)]
    dtypes = [tensor.dtype for tensor in inputs(0)]
    averages = [
        stack.mean(0).trunc() if dtype == torch.int64 else stack.amin(0) if dtype == torch.bool else stack.mean(0)
        for stack, dtype in zip(stacks, dtypes, strict=True)
    ]
    sums = [stack.amax(0) if dtype == torch.bool else stack.sum(0) for stack, dtype in zip(stacks, dtypes, strict=True)]
    scaled = [1.5 * average for average in averages[: len(FLOATS) * len(SHAPES)]]
    return [*averages, *scaled, *sums, *averages[::4], *averages, *[stack.amax(0) for stack in stacks]]


def _values(world: World, buffer_bytes: int) -> list[Any]:
    """Return the results of operations, alone and fused."""
    fusion.BUFFER_BYTES = transfers.BUFFER_BYTES = buffer_bytes
    hvd.init()
    tensors = inputs(world.rank)
    floats = tensors[: len(FLOATS) * len(SHAPES)]
    results = [
        *hvd.grouped_allreduce(tensors),
        *hvd.grouped_allreduce(floats, prescale_factor=0.5, postscale_factor=3),
        *hvd.grouped_allreduce(tensors, op=hvd.Sum),
        *[hvd.allreduce(tensor) for tensor in tensors[::4]],
        *hvd.grouped_allreduce_([tensor.clone() for tensor in tensors]),
        *hvd.grouped_allreduce_(tensors, op=hvd.Max),
    ]
    hvd.shutdown()
    return [result.double().numpy() for result in results]


@pytest.mark.parametrize("size", [2, 3])
def test_every_dtype_is_reduced_as_by_a_reference(size: int) -> None:
    tolerance = {2: 0, 3: 0.01}[size]  # thirds are rounded
    for values in run_in_workers(size, _values, 32 << 20):
        for value, expected in zip(values, reference(size), strict=True):
            np.testing.assert_allclose(value, expected.numpy(), rtol=tolerance, atol=tolerance / 1000)


@pytest.mark.parametrize("buffer_bytes", [1, 10_000, 1 << 20])
def test_the_size_of_the_buffer_changes_no_value(buffer_bytes: int) -> None:
    for values in run_in_workers(2, _values, buffer_bytes):
        for value, expected in zip(values, reference(2), strict=True):
            np.testing.assert_array_equal(value, expected.numpy())


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
TRIALS = 6  # in half of them, by the order of their addresses, the first worker connects to the second


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
            time.sleep(0.7)  # in which the first one connects, and would leave
            os.kill(second.pid, signal.SIGCONT)
            assert second.wait(60) == 0, second.text
            assert first.wait(60) == 0, first.text


def _everything(world: World, staged: bool) -> list[Any]:
    if staged:
        transfers.GlooTransfers = transfers.StagedTransfers  # type: ignore[misc]
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


SIZE = 3
NAMES = 200  # whose entries are longer than the 2 KiB of one exchange


def test_workers_agree_on_messages_of_any_length() -> None:
    def work(world: World) -> int:
        hvd.init()
        rank = hvd.rank()

        def reduced(names: range, count: int) -> None:
            handles = {
                number: hvd.allreduce_async(torch.full((count,), float(number)), name=f"t{number}", op=hvd.Sum)
                for number in names
            }
            for number, handle in handles.items():
                assert hvd.synchronize(handle).tolist() == [SIZE * number] * count

        for count in (1, 600):  # inside the message, and outside
            reduced(range(1), count)
            for names in (3, NAMES):
                reduced(range(names), count)
                reduced(range(names) if rank else range(names)[::-1], count)
        with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(torch.ones(1 + rank), name="other")
        if rank < SIZE - 1:
            assert hvd.allreduce(torch.ones(5), op=hvd.Sum, name="last").tolist() == [SIZE - 1.0] * 5
        last = hvd.join()
        hvd.shutdown()
        return last

    assert run_in_workers(SIZE, work)[0] in range(SIZE - 1)
