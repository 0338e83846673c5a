"""A worker is lost while the GPUs of the others wait for it: nothing that an abort lets through may be kept."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus, run_on_gpus

from lockstep import hvd
from lockstep.hvd.elastic.state import ObjectState
from lockstep.hvd.engine import context as engine
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

FOREVER_US = 1_000_000_000
MARGIN_BYTES = 1 << 20


def _connect(world: World, elastic: bool) -> torch.Tensor:
    hvd.init()
    for name in ("restores_commits", "stays"):
        patch(f"lockstep.world.generations.{name}", lambda: elastic).start()  # until this process exits
    return hvd.allreduce(torch.ones(1, device=torch.device("simgpu", world.rank)), name="connect")


def _reduce_and_lose_the_other(world: World, elastic: bool) -> torch.Tensor:
    """Enqueue an all-reduce on all workers, and end rank 1 before its GPU takes part; return rank 0's result."""
    device = _connect(world, elastic).device
    if world.rank:
        simgpu.delays(collective_us=FOREVER_US)
    result = hvd.allreduce(torch.ones(3, device=device), op=hvd.Sum, name="gradient")
    if world.rank:
        os._exit(1)
    return result


def _commit(world: World) -> None:
    weights = torch.ones(3, device=torch.device("simgpu", world.rank))
    state = ObjectState(bcast_object=lambda value: value, get_rank=hvd.rank, weights=weights, batch=0)
    weights = weights + _reduce_and_lose_the_other(world, elastic=True)  # the step, which the GPU has not taken yet
    state.weights, state.batch = weights, 1
    stream = torch.accelerator.current_stream()
    assert not stream.query()
    with pytest.raises(hvd.HorovodInternalError):
        state.commit()
    stream.synchronize()  # the abort lets the GPU go on
    assert simgpu.counts()["groups aborted"] == 1
    assert weights.tolist() != [3, 3, 3]
    state.restore()
    assert (state.weights.tolist(), state.batch) == ([1, 1, 1], 0)
    raise ZeroDivisionError  # all of that has come true


def test_commit_after_a_loss_keeps_the_copy_before() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:[^$]*ZeroDivisionError"):
        run_on_gpus(2, _commit)


def _commit_with_a_spoiled_gpu(world: World, output: Path) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.environ["SIMGPU_POISON"] = "0"  # the context of rank 0, by the abort
    state = ObjectState(bcast_object=lambda value: value, get_rank=hvd.rank, batch=0)
    _reduce_and_lose_the_other(world, elastic=True)
    with pytest.raises(hvd.HorovodInternalError):
        state.commit()
    assert engine.current is not None
    engine.current.end_device_work()  # as `hvd.elastic.run` does before it restores the commit


def test_a_worker_with_a_spoiled_gpu_exits_to_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_on_gpus(2, _commit_with_a_spoiled_gpu, tmp_path / "output")
    printed = (tmp_path / "output").read_text()
    assert "is replaced, too: its simgpu device cannot be used after the loss of another" in printed
    assert "an illegal memory access was encountered" in printed


def _continue(world: World, output: Path) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _reduce_and_lose_the_other(world, elastic=False)
    torch.accelerator.synchronize()
    print("the GPU goes on", flush=True)
    time.sleep(100)


def test_without_commits_the_process_ends_before_the_gpu_goes_on(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_on_gpus(2, _continue, tmp_path / "output")
    printed = (tmp_path / "output").read_text()
    assert "rank 1 disconnected" in printed
    assert "This worker exits too, because its GPU is waiting for it." in printed
    assert "goes on" not in printed


@on_gpus(2)
def test_error_on_one_gpu_reaches_all_before_anyone_waits(world: World) -> None:
    """Let rank 0's memory end, while rank 1's collective and its next request wait for rank 0."""
    device = _connect(world, elastic=True).device
    large = torch.ones(MARGIN_BYTES, device=device)
    if world.rank == 0:
        used_bytes = torch.get_device_module("simgpu").memory_allocated()
        simgpu.limit_memory(device, used_bytes + MARGIN_BYTES)
    else:
        hvd.allreduce(large, name="large")  # enqueued, and so taken for done
    with pytest.raises(hvd.HorovodInternalError, match=r"out of memory|rank 0 disconnected"):
        hvd.allreduce(large, name="large")
    assert engine.current is not None
    thread = engine.current.channels[0]._thread
    assert thread is not None
    thread.join(60)
    assert simgpu.counts()["groups aborted"] == 1
    assert not thread.is_alive()
