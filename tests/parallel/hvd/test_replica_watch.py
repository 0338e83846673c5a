"""DistributedOptimizer notices that the workers' weights differ, and names rank, parameter and step."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gradients import backward, new_parameters, wrap
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd
from lockstep.errors import ReplicasDifferError
from lockstep.world.world import World

NAMES = ("first", "second", "third")


def take_step(optimizer: Any, parameters: list[torch.Tensor], step: int) -> None:
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), step)
    optimizer.step()


def error_of(training: Callable[[], None]) -> str:
    """Return the error of a training, or "", after hvd's shutdown."""
    try:
        training()
    except ReplicasDifferError as error:
        return str(error)
    finally:
        hvd.shutdown()
    return ""


def train(world: World, steps: int, every: int, spoil: Any = None, **arguments: Any) -> str:
    """Train, call `spoil(step, parameters)` after each step, and return the error."""
    os.environ["LOCKSTEP_CHECK_REPLICAS"] = str(every if world.rank == 0 else 7)  # rank 0 decides
    hvd.init()
    parameters = new_parameters([(4,), (30, 40), (2,)])
    optimizer = wrap(parameters, named_parameters=list(zip(NAMES, parameters, strict=True)), **arguments)

    def training() -> None:
        for step in range(1, steps + 1):
            take_step(optimizer, parameters, step)
            hvd.barrier()  # until the comparison, if there is one, is over
            if spoil is not None:
                with torch.no_grad():
                    spoil(step, parameters)

    return error_of(training)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the replicas in every step, in the workers, which are forked from this process."""
    monkeypatch.setenv("LOCKSTEP_CHECK_REPLICAS", "1")


def at_step(chosen: int, rank: int, index: int) -> Any:
    def spoil(step: int, parameters: list[torch.Tensor]) -> None:
        if step == chosen and hvd.rank() == rank:
            parameters[index].view(-1)[0] += 1e-12

    return spoil


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("size", [2, 4])
def test_first_difference_is_named_on_all_workers(size: int, op: int) -> None:
    errors = run_in_workers(size, partial(train, op=op), 25, 20, at_step(12, 1, 1))
    named = "worker 1 on" if size > 2 else "workers 0 on"
    for error in errors:
        assert "the replicas differ after step 20" in error
        assert named in error
        assert "in 1 of 3 tensors, first in second" in error
        assert "LOCKSTEP_CHECK_REPLICAS=0" in error


@on_workers(2)
def test_missing_broadcast_is_noticed_early() -> None:
    os.environ.pop("LOCKSTEP_CHECK_REPLICAS", None)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(list(model.parameters()), named_parameters=model.named_parameters())

    def training() -> None:
        for _ in range(11):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            hvd.barrier()

    error = error_of(training)
    assert "the replicas differ after step 10:" in error
    assert "in 2 of 2 tensors, first in weight" in error
    assert "no hvd.broadcast_parameters()" in error


@pytest.mark.parametrize("every", [1, 3])
def test_equal_replicas_raise_nothing(every: int) -> None:
    assert run_in_workers(3, train, 20, every) == [""] * 3


def test_check_can_be_turned_off() -> None:
    assert run_in_workers(2, train, 20, 0, at_step(2, 1, 0)) == [""] * 2


@on_workers(3)
def test_steps_are_counted_from_a_join() -> None:
    """Workers have taken different numbers of steps before it, and the last one's weights are broadcast after it."""
    os.environ["LOCKSTEP_CHECK_REPLICAS"] = "5"
    hvd.init()
    parameters = new_parameters([(4,)])
    optimizer = wrap(parameters)

    def training() -> None:
        for epoch in range(3):
            for step in range(6 + hvd.rank()):
                take_step(optimizer, parameters, 10 * epoch + step)
            last = hvd.join()
            hvd.broadcast_parameters([parameter.data for parameter in parameters], last)

    assert error_of(training) == ""


@pytest.mark.usefixtures("every_step")
@on_hvd_workers(3)
def test_joined_workers_are_not_compared(rank: int) -> None:
    parameters = new_parameters([(4,)])
    optimizer = wrap(parameters)

    def training() -> None:
        for step in range(9 if rank else 4):
            take_step(optimizer, parameters, step)
            if step == 6 and rank == 2:
                with torch.no_grad():
                    parameters[0] += 1
        hvd.join()

    if rank == 0:
        training()
    else:
        with pytest.raises(ReplicasDifferError, match=r"after step 8.*workers 1 on"):
            training()
        hvd.join()


@pytest.mark.usefixtures("every_step")
@on_workers(2)
def test_different_numbers_of_parameters_are_named() -> None:
    hvd.init()
    parameters = new_parameters([(4,)])
    optimizer = wrap([*parameters, *[torch.ones(2)] * hvd.rank()])

    def training() -> None:
        for step in range(3):
            take_step(optimizer, parameters, step)

    assert "different numbers of parameters, by rank: {0: 1, 1: 2}" in error_of(training)


@pytest.mark.usefixtures("every_step")
@on_workers(3)
def test_members_of_a_process_set_are_compared_among_themselves(rank: int) -> None:
    pair = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair])
    parameters = new_parameters([(4,)])
    optimizer = wrap(parameters, process_set=pair)

    def training() -> None:
        for step in range(4):
            take_step(optimizer, parameters, step)
            if step == 1 and rank == 2:
                with torch.no_grad():
                    parameters[0] += 1

    error = error_of(training)
    if rank == 0:
        assert error == ""
    else:
        assert "workers 1 on" in error
        assert ", 2 on" in error
