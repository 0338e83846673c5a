"""Connections of workers on simulated GPUs: their end, a script's own group, and the current device."""

from __future__ import annotations

import gc
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import simgpu
import torch
import torch.distributed as dist
from runs import losses, train_digits
from simulated_gpu import on_gpus, run_on_gpus
from worker_group import run_in_workers

from lockstep.errors import StoppedError
from lockstep.world import accelerator, generations, peer_loss
from lockstep.world import world as worlds
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect

pytestmark = pytest.mark.usefixtures("simulated_gpu")

SECOND = torch.device("privateuseone", 1)  # simgpu:1 in its processes


@pytest.mark.parametrize(
    ("error", "stands_down", "aborted"), [(None, False, 0), (ZeroDivisionError, True, 1), (StoppedError, True, 0)]
)
@on_gpus(2)
def test_an_error_aborts_the_groups_of_gpus(
    world: World, error: type[Exception] | None, stands_down: bool, aborted: int
) -> None:
    """The error comes while a collective waits for a peer that does not take part."""
    worlds.disconnect()
    peer_loss.GroupAbort.seconds = 60.0  # on a busy machine
    has_stood_down = False
    try:
        with connect(RankInfo.from_environment(), "gpu") as ours:
            loss_watch, group_watch = cast(list[Any], worlds._watches)
            dist.all_reduce(torch.ones(1, device=ours.device))
            if error is ZeroDivisionError and world.is_main:
                dist.all_reduce(torch.ones(1, device=ours.device))
            if error:
                raise error("words")
    except (ZeroDivisionError, StoppedError):
        has_stood_down = loss_watch._disarmed.is_set() and group_watch._ended.is_set()
        torch.accelerator.synchronize()  # returns
        worlds.disconnect()
    assert not worlds._watches
    assert has_stood_down == stands_down
    assert (simgpu.counts()["groups aborted"], simgpu.counts()["groups shut down"]) == (aborted, 1 - aborted)


@on_gpus(2)
def test_workers_that_stay_handle_errors_of_groups_themselves(world: World) -> None:
    """NCCL's watchdog would end the process if it noticed a loss first."""
    worlds.disconnect()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # as launchers do
    init, found = dist.init_process_group, list[str]()

    def noted(**named: Any) -> None:
        found.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        init(**named)

    for stays in (True, False):
        with (
            patch.object(worlds, "stays", lambda stays=stays: stays),
            patch.object(dist, "init_process_group", noted),
            connect(RankInfo.from_environment(), "gpu"),
        ):
            found.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
    assert found == ["0", "1", "1", "1"]


@on_gpus()
def test_a_device_that_fails_or_hangs_is_unusable() -> None:
    device, stream = torch.device("privateuseone", 0), torch.accelerator.current_stream()
    found = [accelerator.why_unusable(device, 60.0)]
    with simgpu.held(stream):
        torch.zeros(1, device=device).add_(1)
        found.append(accelerator.why_unusable(device, 0.05))
    simgpu.launch_failing_operation(stream)
    found.append(accelerator.why_unusable(device, 60.0))
    assert found[:2] == ["", "it has not finished its work within 0.05 s"]
    assert "injected failure" in found[2]


@on_gpus()
def test_memory_that_torch_keeps_is_given_to_new_groups(tmp_path: Path) -> None:
    os.environ["SIMGPU_MEMORY"] = str(tmp_path / "memory")
    device = torch.device("privateuseone", 0)
    simgpu.limit_memory(device, 64 << 20)
    torch.empty(62 << 20, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize()
    group = accelerator.group(dist.HashStore(), 0, 1, device, timedelta(seconds=60))
    with pytest.raises(dist.DistBackendError, match="Last error:\nFailed to CUDA calloc"):
        group.allreduce([torch.ones(1, device=device)])
    accelerator.empty_cache()
    group.allreduce([torch.ones(1, device=device)]).wait()
    group.shutdown()


def test_survivors_give_memory_back_before_they_connect() -> None:
    assert generations.while_waiting[:2] == [gc.collect, accelerator.empty_cache]


@on_gpus()
def test_timestamps_release_the_gil() -> None:
    """With a full launch queue, no other thread could abort."""
    device = torch.device("privateuseone", 0)
    simgpu.reset_counts()
    start, end = accelerator.timestamp(device), accelerator.timestamp(device)
    assert simgpu.counts()["enqueued while the GIL is held"] == 0
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    torch.accelerator.current_stream().record_event()
    assert simgpu.counts()["enqueued while the GIL is held"] == 1


def _train_in_a_script(world: World, folder: Path, settings: dict[str, Any]) -> tuple[bool, bool]:
    """Train in a script that has called init_process_group("nccl"), where the model is still on the CPU."""
    with connect(RankInfo.from_environment(), "cpu") as ours:
        has_own_group = ours.host_group is not None
    worlds.disconnect()
    dist.init_process_group("simgpu:simccl")
    with connect(RankInfo.from_environment(), "gpu") as ours:
        train_digits(ours, "plain", 96, 24, {**settings, "run_dir": folder})
    dist.destroy_process_group()
    return has_own_group, ours.host_group is not None


def test_script_with_a_group_for_gpus_alone_can_train(tmp_path: Path) -> None:
    settings = {"strategy": "ddp", "precision": "fp64", "epochs": 2, "batch_size": 24, "log_every": 1, "lr": 0.01}
    assert run_on_gpus(2, _train_in_a_script, tmp_path / "gpu", settings) == [(False, True)] * 2
    run_in_workers(2, train_digits, "plain", 96, 24, {**settings, "run_dir": tmp_path / "cpu"})
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-9)


@on_gpus()
def test_each_thread_has_the_device_that_it_chooses() -> None:
    accelerator.use(SECOND)
    accelerator.use(torch.device("cpu"))
    indices = [torch.accelerator.current_device_index()]

    def choose() -> None:
        indices.append(torch.accelerator.current_device_index())
        accelerator.use(SECOND)
        indices.append(torch.accelerator.current_device_index())

    thread = threading.Thread(target=choose)
    thread.start()
    thread.join()
    assert indices == [1, 0, 1]
