"""Workers compute gradients, take steps and join in different orders, and get the same gradients."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import random
import signal
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from gradients import backward, close, gradient, grads, mean, new_parameters, wrap
from kept_lines import KeptLines
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd
from lockstep.world.world import World

Tensor = torch.Tensor
SHAPES = ((700,), (30, 40), (2,), (), (500,))  # three of them are larger than a control message


def take_steps(parameters: list[Tensor], optimizer: Any, steps: Iterable[int]) -> None:
    """Take steps with gradients that differ between workers, and check their means."""
    for step in steps:
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step)
        optimizer.step()
        close(grads(parameters), mean(parameters, range(hvd.size()), step))


@on_hvd_workers(2, 3)
def test_buckets_may_be_ready_in_any_order(size: int) -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=len(SHAPES))
    for step in range(6):
        optimizer.zero_grad()
        order = list(range(len(SHAPES)))
        random.Random(f"{step} {hvd.rank()}").shuffle(order)
        for index in order:
            backward(parameters, hvd.rank(), step, [other for other in order if other != index])
        optimizer.step()
        close(grads(parameters), mean(parameters, range(size), step))


@on_hvd_workers(2)
def test_optimizers_may_compute_and_step_in_different_orders() -> None:
    """A worker may step one optimizer while only a part of the other one's gradients is computed."""
    nets = [new_parameters(SHAPES), new_parameters(SHAPES)]
    one, two = (wrap(net, groups=len(SHAPES)) for net in nets)
    for step in range(8):
        one.zero_grad()
        two.zero_grad()
        backward(nets[0], hvd.rank(), step, [1, 2] if hvd.rank() else [])
        backward(nets[1], hvd.rank(), step)
        if step % 2:
            two.step()
            if hvd.rank():
                backward(nets[0], hvd.rank(), step, [0, 3, 4])
            one.step()
        else:  # all gradients are computed, so even the steps can have different orders
            if hvd.rank():
                backward(nets[0], hvd.rank(), step, [0, 3, 4])
            for optimizer in (one, two) if hvd.rank() else (two, one):
                optimizer.step()
        for net in nets:
            close(grads(net), mean(net, [0, 1], step))


@on_hvd_workers(2)
def test_joined_workers_send_large_gradients_in_same_order() -> None:
    """They have nothing to convert, so their tensors are not copied to a buffer, unlike those of the others."""
    parameters = [torch.ones(shape, requires_grad=True) for shape in ((2,), (600_000,), (3,), (700_000,))]
    optimizer = wrap(parameters, compression=hvd.Compression.fp16)
    for step in range(5 if hvd.rank() else 3):
        optimizer.zero_grad()
        sum((index + 1) * parameter.sum() for index, parameter in enumerate(parameters)).backward()
        optimizer.step()
        for index, parameter in enumerate(parameters):
            close(parameter.grad, torch.full_like(parameter, (index + 1) / (1 if step < 3 else 2)))
    hvd.join()


@on_hvd_workers(2)
def test_worker_may_join_in_the_middle_of_a_step() -> None:
    """The gradients that it has computed count, and zeros replace the rest."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=len(SHAPES))
    take_steps(parameters, optimizer, range(3))
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 3, [1, 2] if hvd.rank() else [])
    if hvd.rank() == 0:
        optimizer.step()
        whole, half = mean(parameters, [0, 1], 3), mean(parameters, [0], 3)
        wanted = [half[index] / 2 if index in (1, 2) else whole[index] for index in range(len(SHAPES))]
        close(grads(parameters), wanted)
    hvd.join()
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(parameters, optimizer, range(4, 6))


@on_hvd_workers(2, 3, groups=[None, 3])
def test_parameters_may_change_shape_together_but_not_alone(groups: int | None) -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, named_parameters=list(zip("abcde", parameters, strict=True)), groups=groups)

    def set_shape(*shape: int) -> None:
        parameters[0].data = torch.ones(shape, dtype=torch.float64)
        parameters[0].grad = None

    for turn in range(2):
        take_steps(parameters, optimizer, range(3))
        set_shape(20, 3 + turn)
        take_steps(parameters, optimizer, range(2))
        set_shape(4 + (hvd.rank() == 1))
        optimizer.zero_grad()
        backward(parameters, hvd.rank())
        with pytest.raises(
            hvd.HorovodInternalError, match=r"Mismatched ALLREDUCE tensor shapes: .*'allreduce\..*ranks 0 and 1\)"
        ):
            optimizer.step()
        set_shape(700)


@on_hvd_workers(2)
def test_a_step_that_all_workers_drop() -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=len(SHAPES))
    take_steps(parameters, optimizer, range(3))
    for left_out in ([0, 1], [4], []):
        backward(parameters, hvd.rank(), 9, left_out)
        hvd.barrier()
        optimizer.load_state_dict(optimizer.state_dict())
        take_steps(parameters, optimizer, range(2))
    optimizer.step()  # without backward


@on_workers(3)
def test_process_sets_may_step_in_different_orders() -> None:
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]
    hvd.init(process_sets=sets)
    nets = [new_parameters(SHAPES) for _ in sets]
    optimizers = [wrap(net, process_set=members) for net, members in zip(nets, sets, strict=True)]
    for step in range(4):
        for index in (0, 1) if hvd.rank() else (1, 0):
            optimizers[index].zero_grad()
            backward(nets[index], hvd.rank(), step)
            optimizers[index].step()
            ranks = sets[index].ranks if sets[index].included() else [hvd.rank()]
            assert ranks is not None
            close(grads(nets[index]), mean(nets[index], ranks, step))
    hvd.shutdown()


def test_stall_report_names_missing_bucket() -> None:
    reported = [multiprocessing.Event() for _ in range(2)]

    def work(world: World) -> list[str]:
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "1"
        hvd.init()
        parameters = new_parameters(SHAPES)
        optimizer = wrap(parameters, named_parameters=list(zip("abcde", parameters, strict=True)), groups=5)
        take_steps(parameters, optimizer, range(3))
        hvd.barrier()  # a slow start is no stall of this step
        kept = KeptLines(reported[world.rank])
        logging.getLogger("lockstep.hvd").addHandler(kept)
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), 3, [1] if hvd.rank() else [])
        if hvd.rank() == 1:
            assert reported[0].wait(60)
            backward(parameters, hvd.rank(), 3, [0, 2, 3, 4])
        optimizer.step()
        close(grads(parameters), mean(parameters, [0, 1], 3))
        hvd.shutdown()
        return kept.lines

    first, second = run_in_workers(2, work)
    assert any("Stalled: allreduce.b has waited" in line and "Missing ranks: 1." in line for line in first)
    assert not any("allreduce.a " in line for line in first)
    assert second == []


def _until_the_error(parameters: list[Tensor], optimizer: Any) -> str:
    try:
        for step in itertools.count():
            optimizer.zero_grad()
            backward(parameters, hvd.rank(), step)
            optimizer.step()
    except hvd.HorovodInternalError as error:
        return str(error)


def _lose(world: World, how: str) -> str | None:
    hvd.init()
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=len(SHAPES))
    take_steps(parameters, optimizer, range(3))
    if hvd.rank() > 0:
        error = _until_the_error(parameters, optimizer)
        hvd.shutdown()
        return error
    optimizer.zero_grad()
    backward(parameters, 0, 3, [2])
    for parameter in parameters[:2]:
        optimizer._handles[parameter][0]()  # until the others have begun the step, and wait for its third bucket
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.shutdown()
    return None


def test_shutdown_in_the_middle_of_a_step() -> None:
    _, *errors = run_in_workers(3, _lose, "shutdown")
    assert all("rank 0 called hvd.shutdown()" in error for error in errors)


def test_worker_is_lost_in_the_middle_of_a_step(tmp_path: Any) -> None:
    def work(world: World) -> None:
        error = _lose(world, "kill")
        (tmp_path / str(world.rank)).write_text(str(error))

    with pytest.raises(AssertionError, match="worker 0:\nended without an answer"):
        run_in_workers(3, work)
    assert all("rank 0 disconnected" in (tmp_path / str(rank)).read_text() for rank in (1, 2))


def _train(seed: int, rank: int, size: int) -> None:
    """Train several networks at once, each worker in its own order and for its own number of steps."""
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    nets, optimizers = [], []
    for _ in range(shared.randint(1, 3)):
        shapes = [shared.choice([(2,), (), (0,), (300,), (40, 30)]) for _ in range(shared.randint(1, 6))]
        nets.append(new_parameters(shapes))
        optimizers.append(wrap(nets[-1], groups=shared.choice([None, 1, len(shapes)])))

    def left_out(step: int, worker: int) -> list[int]:
        generator = random.Random(f"{seed} {step} {worker}")
        return [index for index in range(6) if generator.random() < 0.2]

    def compute(network: int, step: int) -> None:
        optimizers[network].zero_grad()
        left = left_out(step, rank)
        if any(index not in left for index in range(len(nets[network]))):
            backward(nets[network], rank, step, left)

    for epoch in range(3):
        order = [shared.randrange(len(nets)) for _ in range(shared.randint(4, 12))]  # of the steps, by network
        lengths = [shared.randint(1 if epoch else 4, len(order)) for _ in range(size)]
        computed: set[int] = set()  # networks with gradients for their next step
        for turn, network in enumerate(order[: lengths[rank]]):
            for ahead in range(turn, min(turn + own.randint(1, 3), lengths[rank])):
                if order[ahead] not in computed:
                    computed.add(order[ahead])
                    compute(order[ahead], 100 * epoch + ahead)
            optimizers[network].step()
            computed.remove(network)
            step = 100 * epoch + turn
            for index, parameter in enumerate(nets[network]):
                total = torch.zeros_like(parameter)
                for worker in range(size):
                    if turn < lengths[worker] and index not in left_out(step, worker):
                        total += gradient(parameter, index, worker, step)
                close(parameter.grad, total / size)
        last = hvd.join()
        for net in nets:  # the others have taken fewer steps
            hvd.broadcast_parameters([parameter.data for parameter in net], last)


@pytest.mark.parametrize("trainings", [4, pytest.param(10, marks=pytest.mark.long)])
@on_workers(2, 3)
def test_any_training_gives_the_mean_gradients(trainings: int) -> None:
    for seed in range(trainings):
        hvd.init()
        _train(seed, hvd.rank(), hvd.size())
        hvd.shutdown()
