"""The simulated device's collectives: right results, NCCL's order of streams, and NCCL's refusals."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import simgpu
import torch
import torch.distributed as dist
from simulated_gpu import on_gpus, run_on_gpus

from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")
LIMIT = timedelta(seconds=20)


def _group(timeout: timedelta = LIMIT) -> Any:
    return dist.new_group(backend="simccl", timeout=timeout)


def _on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="simgpu")


def _each_collective(world: World) -> dict[str, list[float]]:
    group, rank = _group(), world.rank
    own = _on_device(rank + 1, 10 * (rank + 1))
    results = {
        "all_reduce": own.clone(),
        "average": own.clone(),
        "half": own.to(torch.bfloat16),
        "broadcast": own.clone(),
        "reduce": own.clone(),
        "all_gather": torch.empty(4, device="simgpu"),
        "reduce_scatter": torch.empty(1, device="simgpu"),
        "all_to_all": torch.empty(2, device="simgpu"),
        "uneven": torch.empty(2 if rank == 0 else 4, device="simgpu"),
        "gather": torch.zeros(4, device="simgpu"),
        "scatter": torch.empty(1, device="simgpu"),
        "received": torch.empty(2, device="simgpu"),
    }
    dist.all_reduce(results["all_reduce"], group=group)
    dist.all_reduce(results["average"], dist.ReduceOp.AVG, group=group)
    dist.all_reduce(results["half"], group=group)
    dist.broadcast(results["broadcast"], 1, group=group)
    dist.reduce(results["reduce"], 0, group=group)
    dist.all_gather_into_tensor(results["all_gather"], own, group=group)
    dist.reduce_scatter_tensor(results["reduce_scatter"], own, group=group)
    dist.all_to_all_single(results["all_to_all"], own, group=group)
    sent, received = ([1, 2], [1, 1]) if rank == 0 else ([1, 2], [2, 2])
    dist.all_to_all_single(
        results["uneven"], torch.arange(3.0, device="simgpu") + 10 * rank, received, sent, group=group
    )
    dist.gather(own, list(results["gather"].chunk(2)) if rank == 1 else None, 1, group=group)
    dist.scatter(results["scatter"], list(own.chunk(2)) if rank == 0 else None, 0, group=group)
    if rank == 0:
        dist.send(own, 1, group=group)
    else:
        dist.recv(results["received"], 0, group=group)
    dist.barrier(group=group, device_ids=[rank])
    assert simgpu.counts()["host wait: barrier"] == 1
    dist.destroy_process_group(group)
    return {name: result.tolist() for name, result in results.items()}


def test_collectives_give_right_results() -> None:
    first, second = run_on_gpus(2, _each_collective)
    same = {
        "all_reduce": [3, 30],
        "average": [1.5, 15],
        "half": [3, 30],
        "broadcast": [2, 20],
        "all_gather": [1, 10, 2, 20],
    }
    for result in (first, second):
        assert {name: result[name] for name in same} == same
    assert (first["reduce"], second["reduce"]) == ([3, 30], [2, 20])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([3], [30])
    assert (first["all_to_all"], second["all_to_all"]) == ([1, 2], [10, 20])
    assert (first["uneven"], second["uneven"]) == ([0, 10], [1, 2, 11, 12])
    assert second["gather"] == [1, 10, 2, 20]
    assert (first["scatter"], second["scatter"]) == ([1], [10])
    assert second["received"] == [1, 10]


@pytest.mark.parametrize(("waits", "early"), [(True, 2000), (False, 1000)])
@on_gpus(2)
def test_wait_orders_the_stream_and_not_the_host(world: World, waits: bool, early: float) -> None:
    group = _group()
    dist.all_reduce(_on_device(1), group=group)  # connects
    values = torch.ones(1000, device="simgpu")
    torch.accelerator.synchronize()
    simgpu.reset_counts()
    simgpu.delays(collective_us=200_000 if waits else 2_000_000)  # longer than a busy host takes for the sum
    work = dist.all_reduce(values, group=group, async_op=True)
    if waits:
        work.wait()
    total = values.sum()
    assert not [name for name in simgpu.counts() if "wait" in name]
    assert float(total) == early
    work.wait()
    assert float(values.sum()) == 2000
    dist.destroy_process_group(group)


@on_gpus(2)
def test_collective_waits_for_the_callers_stream(world: World) -> None:
    group = _group()
    values = torch.zeros(1000, device="simgpu")
    with simgpu.held(torch.accelerator.current_stream()):
        values.fill_(1)
        work = dist.all_reduce(values, group=group, async_op=True)
    work.wait()
    assert float(values.sum()) == 2000
    dist.destroy_process_group(group)


@on_gpus(2)
def test_inputs_stay_alive_until_waited_for(world: World) -> None:
    group = _group()
    result = torch.empty(2000, device="simgpu")
    simgpu.delays(collective_us=100_000)
    work = dist.all_gather_into_tensor(result, torch.ones(1000, device="simgpu"), group=group, async_op=True)
    torch.accelerator.current_stream().synchronize()  # the input is freed now, if it is
    work.wait()
    assert float(result.sum()) == 2000
    dist.destroy_process_group(group)


@on_gpus(2)
def test_future_runs_callbacks_in_stream_order(world: World) -> None:
    group = _group()
    simgpu.delays(collective_us=50_000)
    future = dist.all_reduce(_on_device(1), group=group, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert future.done()  # for the host
    assert float(doubled.wait()) == 4
    dist.destroy_process_group(group)


@on_gpus(2)
def test_second_rank_on_a_device_is_refused(world: World) -> None:
    torch.accelerator.set_device_index(0)
    group = _group()
    with pytest.raises(dist.DistBackendError, match="Duplicate GPU detected : rank 0 and rank 1 both on device"):
        dist.all_reduce(torch.ones(1, device="simgpu:0"), group=group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("order", "BROADCAST 0 of 4 elements of Float from rank 0"),
        ("size", "ALLREDUCE 0 of 3 elements of Float with operation 0"),
        ("dtype", "ALLREDUCE 0 of 4 elements of Double with operation 0"),
    ],
)
@on_gpus(2)
def test_different_calls_fail_on_both_ranks(world: World, what: str, other: str) -> None:
    group = _group()
    values = torch.ones(4, device="simgpu")
    if what == "order" and world.rank == 1:
        dist.broadcast(values, 0, group=group, async_op=True)
    else:
        others = {"size": values[:3], "dtype": values.double()} if world.rank else {}
        dist.all_reduce(others.get(what, values), group=group, async_op=True)
    expected = f"rank 0 calls ALLREDUCE 0 of 4 elements of Float with operation 0, rank 1 calls {other}"
    with pytest.raises(RuntimeError, match=expected):
        torch.accelerator.synchronize()
    dist.destroy_process_group(group)


def _abort_stuck(world: World) -> tuple[bool, bool, str]:
    group = _group()
    dist.all_reduce(_on_device(1), group=group)  # connects
    world.barrier()
    was_stuck, error = False, ""
    if world.rank == 0:
        backend = group._get_backend(torch.device("simgpu"))
        work = dist.all_reduce(_on_device(1), group=group, async_op=True)
        work.wait()
        was_stuck = not torch.accelerator.current_stream().query()
        aborting = threading.Timer(0.1, backend.abort)
        aborting.start()
        torch.accelerator.synchronize()  # returns only because of the abort
        aborting.join()
        with pytest.raises(dist.DistBackendError) as refused:
            dist.all_reduce(_on_device(1), group=group)
        error = str(refused.value).splitlines()[0]
        usable = float((_on_device(1) + 1).sum()) == 2
    else:
        usable = True
        group._get_backend(torch.device("simgpu")).abort()
    world.barrier()
    dist.destroy_process_group(group)
    return was_stuck, usable, error


@pytest.mark.long  # decided by timers
def test_abort_releases_a_stuck_collective() -> None:
    first, second = run_on_gpus(2, _abort_stuck)
    assert first == (True, True, "simccl: the group was aborted")
    assert second == (False, True, "")


def _call_after_the_peers_end(world: World) -> None:
    group = _group()
    pid = torch.tensor([os.getpid() * world.rank], device="simgpu")
    dist.all_reduce(pid, group=group)
    peer = psutil.Process(int(pid))
    if world.rank:
        os._exit(0)
    while peer.is_running() and peer.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    time.sleep(0.2)  # Gloo notices it, too
    dist.all_reduce(_on_device(1), group=group, async_op=True).wait()
    stream = torch.accelerator.current_stream()
    time.sleep(0.2)
    assert not stream.query()
    group._get_backend(torch.device("simgpu")).abort()
    stream.synchronize()  # without an error
    raise ZeroDivisionError  # all of that has come true


def test_collective_is_stuck_if_the_peer_has_exited_before() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:[^$]*ZeroDivisionError"):
        run_on_gpus(2, _call_after_the_peers_end)


NEVER_MS = "3600000"


def _lose_a_remote_peer(world: World, handling: str, watch_ms: str) -> None:
    faulthandler.disable()  # pytest's would print the stacks of the process that ends
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": handling, "SIMGPU_REMOTE": "1", "SIMGPU_WATCH_MS": watch_ms}
    group = _group()
    dist.all_reduce(_on_device(1), group=group)
    torch.accelerator.synchronize()
    if world.rank:
        os._exit(0)
    work = dist.all_reduce(_on_device(1), group=group, async_op=True)
    while not simgpu.counts()["collectives that lost a peer"]:
        time.sleep(0.01)
    if watch_ms == NEVER_MS:
        assert not work.is_completed()
    else:
        while not work.is_completed():
            time.sleep(0.01)
        with pytest.raises(dist.DistBackendError, match="remote process exited or there was a network error"):
            work.wait()
    if handling == "0":
        assert torch.accelerator.current_stream().query() == (watch_ms == NEVER_MS)
        group._get_backend(torch.device("simgpu")).abort()
    torch.accelerator.synchronize()
    raise ZeroDivisionError  # all of that has come true


@pytest.mark.parametrize(("handling", "watch_ms"), [("0", "1"), ("2", "1"), ("0", NEVER_MS)])
def test_watchdog_fails_a_collective_without_its_remote_peer(handling: str, watch_ms: str) -> None:
    with pytest.raises(AssertionError, match=r"worker 0:[^$]*ZeroDivisionError"):
        run_on_gpus(2, _lose_a_remote_peer, handling, watch_ms)


def test_the_default_watchdog_ends_the_process() -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_on_gpus(2, _lose_a_remote_peer, "3", "1")


def _abort_connecting(world: World) -> str:
    group = _group()
    if world.rank == 0:
        threading.Timer(0.1, group._get_backend(torch.device("simgpu")).abort).start()
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(_on_device(1), group=group)
        message = str(error.value).splitlines()[0]
    else:
        message = ""
    world.barrier()
    dist.destroy_process_group(group)
    return message


@pytest.mark.long  # decided by timers
def test_abort_releases_a_rank_that_connects() -> None:
    assert run_on_gpus(2, _abort_connecting) == ["simccl: the communicator was aborted", ""]


@on_gpus(2)
def test_wrong_tensors_and_closed_groups_are_refused(world: World) -> None:
    group = _group()
    backend = group._get_backend(torch.device("simgpu"))
    backend.allreduce([_on_device(1)]).wait()
    other = f"simgpu:{1 - world.rank}"
    refused = {
        "expected a tensor on simgpu, but it is on cpu": torch.ones(2),
        "Tensors must be contiguous": _on_device(1, 2, 3, 4)[::2],
        f"the group uses simgpu:{world.rank}, but a tensor is on {other}": torch.ones(1, device=other),
    }
    for message, tensor in refused.items():
        with pytest.raises(RuntimeError, match=rf"^simccl: {message}"):
            backend.allreduce([tensor])
    backend.shutdown()
    with pytest.raises(dist.DistBackendError, match=r"^simccl: the group was shut down"):
        backend.allreduce([_on_device(1)])


def _time_out(world: World, handling: str) -> tuple[str, bool]:
    faulthandler.disable()  # pytest's would print the stacks of the process that ends
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = handling
    group = _group(timedelta(seconds=2))  # also the limit for connecting
    backend = group._get_backend(torch.device("simgpu"))
    dist.all_reduce(_on_device(1), group=group)
    world.barrier()
    message, is_stuck = "", False
    if world.rank == 0:
        work = dist.all_reduce(_on_device(1), group=group, async_op=True)
        while not work.is_completed():
            threading.Event().wait(0.01)
        with pytest.raises(dist.DistBackendError) as error:
            work.wait()
        message, is_stuck = str(error.value), handling == "0" and not torch.accelerator.current_stream().query()
        backend.abort()
        torch.accelerator.synchronize()
    world.barrier()
    dist.destroy_process_group(group)
    return message, is_stuck


@pytest.mark.long  # decided by timers
@pytest.mark.parametrize("handling", ["0", "2"])
def test_watchdog_fails_a_collective_after_the_timeout(handling: str) -> None:
    message, is_stuck = run_on_gpus(2, _time_out, handling)[0]
    assert "Watchdog caught collective operation timeout: ALLREDUCE 1" in message
    assert is_stuck == (handling == "0")


@pytest.mark.long  # decided by timers
def test_watchdog_ends_the_process_by_default() -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_on_gpus(2, _time_out, "3")
