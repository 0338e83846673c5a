"""A worker is lost while the accelerators of the others wait for it: nothing that an abort lets through may be kept."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import fake_accelerator as fake
import pytest
import torch
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.elastic.base import ObjectState
from lockstep.hvd.engine import current as horovod
from lockstep.world.world import World


def _reduce_and_lose_the_other(world: World, elastic: bool) -> fake.Machine | None:
    """All workers enqueue an all-reduce; all but rank 0 end before it has run, and rank 0's waits for them."""
    machine = fake.install()
    hvd.init()
    assert horovod.context is not None
    channel = horovod.context.channels[0]
    channel._settings = replace(channel._settings, elastic=elastic)
    hvd.allreduce(torch.zeros(3, device=fake.DEVICE))
    machine.stuck = True
    hvd.allreduce(torch.zeros(3, device=fake.DEVICE))
    if world.rank:
        os._exit(1)
    return machine


def _commit(world: World) -> None:
    weights = [1.0]
    machine = _reduce_and_lose_the_other(world, elastic=True)
    assert machine is not None
    state = ObjectState(bcast_object=lambda value: value, get_rank=hvd.rank, weights=weights, batch=0)
    state.weights, state.batch = [2.0], 1  # the optimizer's step, which the device has not taken yet
    machine.when_let_go = lambda: state.weights.__setitem__(0, math.nan)  # it takes part of a sum for the gradient
    with pytest.raises(hvd.HorovodInternalError):
        state.commit()
    assert machine.groups[0].ended == ["abort"]
    state.restore()
    assert (state.weights, state.batch) == ([1.0], 0)
    raise ZeroDivisionError  # all of that has come true


def test_a_commit_after_a_loss_keeps_the_copy_before() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:[^$]*ZeroDivisionError"):
        run_in_workers(2, _commit)


def _go_on(world: World) -> None:
    machine = _reduce_and_lose_the_other(world, elastic=False)
    assert machine is not None
    machine.when_let_go = lambda: print("the accelerator goes on")
    time.sleep(100)  # and then answer


def test_without_commits_the_process_ends_before_the_accelerator_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_in_workers(2, _go_on)
    said = capfd.readouterr()
    assert "rank 1 disconnected" in said.err
    assert "This worker exits too, because its GPU is waiting for it." in said.err
    assert "goes on" not in said.out


def _fail_on_one(world: World) -> list[str]:
    """Rank 0's library fails, while the other's kernel and its next round wait for rank 0."""
    machine = fake.install()
    hvd.init()
    hvd.allreduce(torch.zeros(3, device=fake.DEVICE))
    (group,) = machine.groups
    group.shutdown = lambda: time.sleep(100)  # type: ignore[method-assign]  # as NCCL's waits for its peers
    if world.rank == 0:
        group.allreduce = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign]
    if world.rank:
        hvd.allreduce(torch.zeros(3, device=fake.DEVICE))  # enqueued, and so taken for done
    with pytest.raises(hvd.HorovodInternalError, match=r"out of memory|rank 0 disconnected"):
        hvd.allreduce(torch.zeros(3, device=fake.DEVICE))
    assert horovod.context is not None
    thread = horovod.context.channels[0]._thread
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    return group.ended


def test_an_error_of_one_worker_reaches_all_before_anybody_waits_for_a_device() -> None:
    assert run_in_workers(2, _fail_on_one) == [["abort"], ["abort"]]
