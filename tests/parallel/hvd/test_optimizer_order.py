"""The orders in which scripts call backward, synchronize, step, zero_grad and the gradient scaler, and wrong ones."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import SHAPES, backward, bits, close, grads, mean, new_parameters, wrap
from torch.nn.utils import clip_grad_norm_
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.world.world import World

Tensor = torch.Tensor


def plain(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(parameters, hvd.rank())
    optimizer.step()


def clipped(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(parameters, hvd.rank())
    optimizer.synchronize()
    clip_grad_norm_(parameters, 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()


def twice_synchronised(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(parameters, hvd.rank())
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
        optimizer.step()


def with_closure(parameters: list[Tensor], optimizer: Any) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        backward(parameters, hvd.rank())
        return 0.1 + hvd.rank()

    close(optimizer.step(closure), 0.1 + (hvd.size() - 1) / 2)


def zeroed_by_the_model(parameters: list[Tensor], optimizer: Any) -> None:
    for parameter in parameters:
        parameter.grad = None
    backward(parameters, hvd.rank())
    optimizer.step()


def zeroed_in_place(parameters: list[Tensor], optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(parameters, hvd.rank())
    optimizer.step()


ORDERS: list[Callable[[list[Tensor], Any], None]] = [
    plain,
    clipped,
    twice_synchronised,
    with_closure,
    zeroed_by_the_model,
    zeroed_in_place,
]


def expected_after(order: Any, parameters: list[Tensor]) -> list[Tensor]:
    step = mean(parameters, range(hvd.size()))
    norm = torch.stack([part.square().sum() for part in step]).sum().sqrt()
    scale = min(1.0, 1.0 / (norm.item() + 1e-6)) if order is clipped else 1.0
    return [parameter.detach() - 0.1 * scale * part for parameter, part in zip(parameters, step, strict=True)]


@on_hvd_workers(2, 3)
def test_every_documented_order_takes_the_average_step() -> str:
    parameters = new_parameters()
    optimizer = wrap(parameters)
    for order in [*ORDERS, *reversed(ORDERS)]:
        expected = expected_after(order, parameters)
        order(parameters, optimizer)
        close([parameter.detach() for parameter in parameters], expected)
    return bits(parameters)


@on_hvd_workers(2)
def test_synchronized_gradients_add_up() -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters)
    for step in range(2):
        backward(parameters, hvd.rank(), step)
        optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    # The second reduction takes the first one's result with it: the average of equal parts is that part.
    close(grads(parameters), [sum(terms) for terms in zip(*[mean(parameters, [0, 1], s) for s in (0, 1)], strict=True)])


@on_hvd_workers(2)
def test_calls_in_a_wrong_order_are_refused() -> None:
    parameters = new_parameters()
    for arguments in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
        optimizer = wrap(parameters, **arguments)
        for left_out in ((), (0, 3)):  # where some have no gradient, no bucket may be complete
            optimizer.zero_grad()
            backward(parameters, hvd.rank(), left_out=left_out)
            with pytest.raises(AssertionError, match=r"zero_grad\(\) was called after loss.backward"):
                optimizer.zero_grad()
            if "backward_passes_per_step" in arguments:
                backward(parameters, hvd.rank(), left_out=left_out)
            with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
                backward(parameters, hvd.rank(), left_out=left_out)
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        plain(parameters, optimizer) if "groups" in arguments else None


@on_hvd_workers(2)
def test_a_model_may_be_wrapped_again_and_again() -> str:
    parameters = new_parameters()
    names = list(zip("abcdefg", parameters, strict=True))
    users = torch.optim.SGD(parameters, lr=0.1)
    for turn in range(4):
        if turn == 2:  # as an elastic job does when its workers change
            hvd.shutdown()
            hvd.init()
        optimizer = hvd.DistributedOptimizer(users, named_parameters=names)
        for _ in range(2):
            expected = expected_after(plain, parameters)
            plain(parameters, optimizer)
            close([parameter.detach() for parameter in parameters], expected)
        hvd.shutdown()
        hvd.init()
        plain(parameters, optimizer)  # also one that was made before
    return bits(parameters)


@on_hvd_workers(2)
def test_a_shutdown_in_the_middle_of_a_step_is_forgotten(world: World) -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters)
    backward(parameters, hvd.rank())
    hvd.barrier()  # until both have begun
    hvd.shutdown()
    optimizer.zero_grad()
    with pytest.raises(hvd.HorovodInternalError, match="not been initialized"):
        backward(parameters, world.rank)
    hvd.init()
    plain(parameters, optimizer)
    close(grads(parameters), mean(parameters, [0, 1]))


@on_hvd_workers(2)
def test_the_state_goes_round_through_a_file() -> str:
    runs = []
    for interrupted in (False, True):
        parameters = new_parameters()
        optimizer = wrap(parameters, torch.optim.Adam)
        for step in range(4):
            if interrupted and step == 2:
                saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                parameters = [parameter.detach().clone().requires_grad_() for parameter in parameters]
                optimizer = wrap(parameters, torch.optim.Adam)
                optimizer.load_state_dict(copy.deepcopy(saved))
            optimizer.zero_grad()
            backward(parameters, hvd.rank(), step)
            optimizer.step()
        runs.append(bits(parameters))
    hvd.shutdown()
    assert runs[0] == runs[1]
    return runs[0]


@on_hvd_workers(2)
def test_schedule_made_before_wrapping_survives_state_broadcast() -> str:
    parameters = new_parameters()
    users = torch.optim.SGD(parameters, lr=0.1 + hvd.rank(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(users, 1, 0.5)
    optimizer: Any = hvd.DistributedOptimizer(users)
    plain(parameters, optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(parameters, root_rank=0)
    for _ in range(2):
        plain(parameters, optimizer)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 4
    return bits(parameters)


@on_hvd_workers(2)
def test_compiled_models_train_alike() -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2)).double()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizers = [wrap(list(m.parameters()), named_parameters=m.named_parameters()) for m in (model, twin)]
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        inputs = torch.randn(5, 4, dtype=torch.float64)
        for forward, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            forward(inputs).square().sum().backward()
            optimizer.step()
    close(list(model.parameters()), list(twin.parameters()))
    return bits(model.parameters())


@on_hvd_workers(2, 3, arguments=[{}, {"groups": 99}])
def test_training_goes_on_after_a_disagreement(arguments: dict[str, Any]) -> str:
    """One worker's gradient has another dtype."""
    parameters = new_parameters((*SHAPES, (1000, 1000)))  # some still on their way when the first ones fail
    optimizer = wrap(parameters, **arguments)
    for in_place in (False, True, False):
        plain(parameters, optimizer)
        optimizer.zero_grad(set_to_none=not in_place)
        if hvd.rank() == 1:
            parameters[0].data = parameters[0].data.float()
            parameters[0].grad = None
        backward(parameters, hvd.rank())
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched data types"):
            optimizer.step()
        if hvd.rank() == 1:
            parameters[0].data = parameters[0].data.double()
            parameters[0].grad = None
    hvd.broadcast_parameters(parameters, root_rank=0)
    optimizer.zero_grad()
    plain(parameters, optimizer)
    close(grads(parameters), mean(parameters, range(hvd.size())))
    return bits(parameters)


@on_hvd_workers(2)
def test_a_step_without_any_backward_takes_zeros() -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # no gradients anywhere: zeros
    close(grads(parameters), [torch.zeros_like(parameter) for parameter in parameters])


@on_hvd_workers(2)
def test_models_are_freed_when_their_optimizers_are() -> None:
    for _ in range(2):
        parameters = new_parameters()
        plain(parameters, optimizer := wrap(parameters))
        alive = weakref.ref(parameters[0])
        del parameters, optimizer
        gc.collect()
        assert alive() is None


@on_hvd_workers(2, zeroed_by=["optimizer", "model", "in_place"], passes=[1, 2])
def test_gan_trains_in_a_plain_loop(zeroed_by: str, passes: int) -> None:
    """The loop of PyTorch's DCGAN example: the generator's loss leaves gradients in the discriminator, too."""

    def train(distributed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        discriminator = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        generator = torch.nn.Linear(2, 3).double()
        models = discriminator, generator
        optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
        if distributed:
            options = [{"backward_passes_per_step": passes}, {}]
            pairs = zip(optimizers, models, options, strict=True)
            optimizers = [hvd.DistributedOptimizer(each, m.named_parameters(), **more) for each, m, more in pairs]
        own = slice(hvd.rank(), None, hvd.size()) if distributed else slice(None)

        def clear(index: int) -> None:
            if zeroed_by == "optimizer":
                optimizers[index].zero_grad()
            else:
                models[index].zero_grad(set_to_none=zeroed_by == "model")

        for step in range(4):
            real, noise = (torch.randn(4, width, dtype=torch.float64).add(step)[own] for width in (3, 2))
            clear(0)
            fake = generator(noise)
            losses = [discriminator(real).square().mean(), (discriminator(fake.detach()) - 1).square().mean()]
            for loss in losses if passes == 2 else [sum(losses)]:
                loss.backward()
            optimizers[0].step()
            clear(1)
            discriminator(fake).square().mean().backward()
            optimizers[1].step()
        return [parameter for model in models for parameter in model.parameters()]

    close(train(True), train(False))
