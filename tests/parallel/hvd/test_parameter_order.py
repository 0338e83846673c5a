"""Parameters in another order on each worker, as those of a set: right results, or an error on all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradients import close
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd
from lockstep.errors import ReplicasDifferError
from lockstep.hvd.optimizer.replica_watch import FIRST_STEP

OTHER = [0, 2, 1, 3]  # rank 1's order; the first and the last parameter are at the same places
ARGUMENTS: list[dict[str, Any]] = [{}, {"groups": 2}, {"op": hvd.Adasum}, {"compression": hvd.Compression.fp16}]
CAUSE = "A set of names has another order in each process"
Tensor = torch.Tensor


def parameters_of(*values: float) -> list[Tensor]:
    return [torch.full((3,), float(value), requires_grad=True) for value in values]


def of_rank(items: list[Any], rank: int) -> list[Any]:
    """Return the items in the order of a worker."""
    return [items[index] for index in OTHER] if rank == 1 else items


def named(parameters: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"layer{number}", parameter) for number, parameter in enumerate(parameters)]


def backward(parameters: list[Tensor]) -> None:
    """Give each parameter another gradient, in the same order on all workers."""
    torch.stack([(parameter * 10**number).sum() for number, parameter in enumerate(parameters)]).sum().backward()


def error_of(optimizer: Any, parameters: list[Tensor]) -> str:
    backward(parameters)
    with pytest.raises(hvd.HorovodInternalError) as error:
        optimizer.step()
    return str(error.value)


@on_hvd_workers(2, arguments=ARGUMENTS)
def test_order_of_the_groups_does_not_matter(arguments: dict[str, Any], rank: int) -> None:
    parameters = parameters_of(0, 0, 0, 0)
    optimizer = torch.optim.SGD(of_rank(parameters, rank), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named(parameters), **arguments)
    backward(parameters)
    optimizer.step()
    close([parameter[0].item() for parameter in parameters], [-1.0, -10.0, -100.0, -1000.0])


@on_hvd_workers(2)
def test_order_of_lists_of_groups_does_not_matter(rank: int) -> None:
    parameters = parameters_of(0, 0, 0, 0)
    a, b, c, d = parameters
    groups = [[d, c], [a, b]] if rank else [[a, b], [c, d]]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters), groups=groups)
    backward(parameters)
    optimizer.step()
    close([parameter[0].item() for parameter in parameters], [-1.0, -10.0, -100.0, -1000.0])


@on_hvd_workers(2, arguments=ARGUMENTS)
def test_names_in_another_order_are_an_error(arguments: dict[str, Any], rank: int) -> str:
    parameters = parameters_of(0, 0, 0, 0)
    names = of_rank(named(parameters), rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, **arguments)
    error = error_of(optimizer, parameters)
    assert error.startswith("Mismatched parameters: From number ")
    assert error.index("layer") < error.index("another rank has layer")
    assert CAUSE in error
    return error


@on_workers(3)
def test_process_sets_compare_names_too(rank: int) -> None:
    hvd.init(process_sets=[pair := hvd.ProcessSet([1, 2])])
    parameters = parameters_of(0, 0, 0, 0)
    names = of_rank(named(parameters), rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names, process_set=pair)
    if rank:
        assert "ranks 1 and 2" in error_of(optimizer, parameters)


@on_hvd_workers(2)
def test_freezing_other_parameters_is_an_error(rank: int) -> None:
    parameters = parameters_of(0, 0, 0, 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
    parameters[1 + rank].requires_grad_(False)
    assert "freeze the same ones" in error_of(optimizer, parameters)


@on_hvd_workers(2)
def test_shapes_in_another_order_name_the_cause(rank: int) -> None:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in (2, 3, 4, 5)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(of_rank(parameters, rank), lr=1.0))
    error = error_of(optimizer, parameters)
    assert "tensor shapes: One rank sent a tensor of shape" in error
    assert CAUSE in error


@on_hvd_workers(2, arguments=[{}, {"op": hvd.Adasum}])
def test_replicas_with_unnamed_parameters_reordered_differ(arguments: dict[str, Any], rank: int) -> None:
    parameters = parameters_of(1, 2, 3, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(of_rank(parameters, rank), lr=1.0), **arguments)

    def train(steps: int) -> None:
        for _ in range(steps):
            backward(parameters)
            optimizer.step()
            optimizer.zero_grad()

    train(FIRST_STEP - 1)
    with pytest.raises(ReplicasDifferError, match="parameters without names in another order"):
        train(100)


@on_hvd_workers(2)
def test_weights_that_are_broadcast_later_are_no_error(rank: int) -> None:
    parameters = parameters_of(1 + rank, 2 + rank, 3 + rank, 4 + rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    backward(parameters)
    optimizer.step()


@on_hvd_workers(2)
def test_other_sets_of_names_are_an_error(rank: int) -> None:
    parameters = parameters_of(0, 0, 0, 0)
    names = [(f"{'a' if rank else 'z'}{name}", parameter) for name, parameter in named(parameters)]
    assert "layer0, " in error_of(hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), names), parameters)


@on_hvd_workers(2, form=[dict, list])
def test_broadcasts_compare_names(form: Any, rank: int) -> str:
    pairs = [("weight", torch.ones(2)), *[("bias", torch.ones(2))] * (rank == 0)]
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.broadcast_parameters(form(pairs), 0)
    assert "From number 1 on, one rank has bias, weight, but another rank has weight" in str(error.value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
    return str(error.value)


def optimizer_of(kind: str, rank: int) -> Any:
    """Return an optimizer with momentum whose parameters are in the order of a worker."""
    values = [torch.full((2 + number if kind == "shapes" else 2,), 1.0 + number) for number in range(4)]
    parameters = [value.requires_grad_() for value in values]
    optimizer: Any = torch.optim.SGD(of_rank(parameters, rank), lr=1.0, momentum=0.5)
    return hvd.DistributedOptimizer(optimizer, named(parameters)) if kind == "names" else optimizer


MESSAGES = {
    "names": "one rank has layer1 [2] (group 0, number 1), layer2 [2] (group 0, number 2), layer3",
    "shapes": "one rank has parameter [3] (group 0, number 1), parameter [4] (group 0, number 2), parameter [5]",
    "values": "places of parameter [2] (group 0, number 1), parameter [2] (group 0, number 2). ",
}


@on_hvd_workers(2, kind=MESSAGES)
def test_states_in_another_order_are_an_error(kind: str, rank: int) -> str:
    optimizer = optimizer_of(kind, rank)
    hvd.broadcast_optimizer_state(optimizer, 0)  # nothing goes by index yet
    if rank == 0:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    with pytest.raises((hvd.HorovodInternalError, ReplicasDifferError)) as error:
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert MESSAGES[kind] in str(error.value)
    assert CAUSE in str(error.value)
    return str(error.value)


@on_hvd_workers(2)
def test_groups_in_another_order_are_an_error(rank: int) -> None:
    groups = [{"params": parameter, "lr": 0.1} for parameter in [torch.ones(2), torch.ones(3)]]
    with pytest.raises(hvd.HorovodInternalError, match=r"one rank has parameter \[2\] \(group 0, number 0\), "):
        hvd.broadcast_optimizer_state(torch.optim.SGD(groups[::-1] if rank else groups), 0)
