"""Parameters, optimizer states and objects, from one worker to the others or from all to all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn, optim
from wide_optimizer import WideOptimizer
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.hvd.ops import functions

Parameters = list[nn.Parameter]
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda p, lr: optim.SGD(p, lr),
    "SGD with momentum": lambda p, lr: optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "Adam": lambda p, lr: optim.Adam(p, lr),
    "Adam, lr as a tensor": lambda p, lr: optim.Adam(p, torch.tensor(lr)),
    "AdamW with amsgrad": lambda p, lr: optim.AdamW(p, lr, amsgrad=True, weight_decay=0.1),
    "two groups": lambda p, lr: optim.AdamW([{"params": p[:1], "lr": lr}, {"params": p[1:], "lr": lr / 2}]),
    **{
        name: getattr(optim, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Muon")
        if hasattr(optim, name)  # Muon is not, before torch 2.9
    },
    "SparseAdam": lambda p, lr: optim.SparseAdam(p, lr),
}


def _parameters(rank: int) -> Parameters:
    generator = torch.Generator().manual_seed(rank)
    return [nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(2)]


def _step(optimizer: optim.Optimizer, count: int) -> None:
    for turn in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.full_like(parameter, 0.5 + turn)
                parameter.grad = gradient.to_sparse(1) if isinstance(optimizer, optim.SparseAdam) else gradient
        optimizer.step()


def _comparable(value: Any) -> Any:
    """Nested states with tensors as their dtype and bits."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    return [_comparable(item) for item in value] if isinstance(value, (list, tuple)) else value


@on_hvd_workers(2)
def test_optimizer_without_state_keeps_each_parameters_gradient() -> None:
    first, second, frozen = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    frozen.requires_grad_(False)
    second.grad = torch.full((2, 3), 5.0)
    optimizer = optim.AdamW([first, second, frozen], lr=0.1, weight_decay=0.5)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert first.grad is not None
    assert first.grad.tolist() == [[0.0] * 3] * 2
    assert second.grad.tolist() == [[5.0] * 3] * 2
    assert frozen.grad is None
    assert first.tolist() == second.tolist() == [[1.0] * 3] * 2, "a step was taken"
    _step(optimizer, 1)
    optimizer.zero_grad(set_to_none=True)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert first.grad is None, "there was state"
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optim.SGD(model.parameters(), 0.1)), 0, model)
    assert [parameter.grad is not None and parameter.grad.is_sparse for parameter in model.parameters()] == [
        *(True, False, False)
    ]


@on_hvd_workers(2, who=["all", "root", "others", "nobody"], name=OPTIMIZERS)
def test_optimizers_get_the_roots_state_and_step_alike(who: str, name: str) -> None:
    root = 1
    is_root = hvd.rank() == root
    parameters = _parameters(hvd.rank())
    optimizer = OPTIMIZERS[name](parameters, lr=0.1 if is_root else 0.7)
    if who == "all" or (who == "root" and is_root) or (who == "others" and not is_root):
        _step(optimizer, 2 + hvd.rank())
    weights = [parameter.detach().clone() for parameter in parameters]
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, root)
    after = optimizer.state_dict()
    assert all(map(torch.equal, weights, parameters)), "no weight is touched"
    if is_root:
        assert _comparable(after) == _comparable(before), "the root is as it was"
    states = hvd.allgather_object(_comparable(after))
    assert all(state == states[root] for state in states)
    hvd.broadcast_parameters([parameter.data for parameter in parameters], root)
    _step(optimizer, 2)
    stepped = hvd.allgather_object([_comparable(parameters), _comparable(optimizer.state_dict())])
    assert all(one == stepped[0] for one in stepped)


@on_hvd_workers(2, who=["all", "root"])
def test_state_keeps_its_dtypes(who: str) -> None:
    parameters = [nn.Parameter(parameter.detach().bfloat16()) for parameter in _parameters(0)]
    optimizer = WideOptimizer(parameters)
    if who == "all" or hvd.rank() == 0:
        _step(optimizer, 3 + hvd.rank())
    state = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0)
    states = hvd.allgather_object([_comparable(state), _comparable(optimizer.state_dict())])
    assert all(after == states[0][0] for _, after in states)


@on_hvd_workers(2)
def test_hyper_parameters_of_any_kind_are_the_roots() -> None:
    rank = hvd.rank()
    optimizer = optim.AdamW(_parameters(0), lr=0.1 * (rank + 1), betas=(0.5 + 0.1 * rank, 0.9), weight_decay=rank)
    optimizer.param_groups[0]["own"] = {"name": f"rank {rank}", "nothing": None if rank == 0 else 1}
    hvd.broadcast_optimizer_state(optimizer, 0)
    group = optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (0.1, (0.5, 0.9), 0)
    assert group["own"] == {"name": "rank 0", "nothing": None}
    assert all(map(torch.equal, group["params"], _parameters(0))), "a step has been taken"
    assert not optimizer.state_dict()["state"]


class _Pair(NamedTuple):
    one: Any
    two: Any


class _Dict(dict[str, Any]):
    pass


class _List(list[Any]):
    pass


@on_hvd_workers(2)
def test_tensors_in_subclasses_of_containers_are_broadcast() -> None:
    parameters = _parameters(0)
    optimizer = optim.SGD(parameters, 0.1)
    one, two, three = (torch.full((2,), float(10 * hvd.rank() + number)) for number in range(3))
    optimizer.state[parameters[0]] = {"own": _Dict(one=one, more=_List([two]))}
    optimizer.param_groups[0]["pair"] = _Pair(three, "text")
    with mock.patch.object(functions, "broadcast_", wraps=functions.broadcast_) as broadcast:
        hvd.broadcast_optimizer_state(optimizer, 0)
    names = [call.args[2] for call in broadcast.call_args_list]
    assert names[2:] == ["optimizer_state.0", "optimizer_state.1", "optimizer_state.2"], "none is in the pickle"
    assert _comparable(optimizer.state[parameters[0]]["own"]) == _comparable({"one": 0 * one, "more": [0 * two + 1]})
    assert _comparable(optimizer.param_groups[0]["pair"].one) == _comparable(0 * three + 2)


def _model(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), nn.Embedding(5, 2), nn.Linear(2, 2)
    )
    model[3].to(torch.float16)
    model[1].num_batches_tracked += rank
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    model.register_buffer("nothing", torch.empty(0))
    return model


@on_hvd_workers(3)
def test_parameters_become_the_roots_in_place() -> None:
    for root in range(hvd.size()):
        wanted = _model(root).state_dict()
        forms: list[Callable[[nn.Module], Any]] = [
            lambda model: model.state_dict(),
            lambda model: dict(reversed(model.state_dict().items())),
            lambda model: list(model.state_dict().items()),
            lambda model: list(model.state_dict().values()),
        ]
        for form in forms:
            model = _model(hvd.rank())
            places = [tensor.data_ptr() for tensor in model.state_dict().values()]
            hvd.broadcast_parameters(form(model), root)
            assert [tensor.data_ptr() for tensor in model.state_dict().values()] == places
            assert all(tensor.equal(wanted[name]) for name, tensor in model.state_dict().items())
            assert all(parameter.requires_grad for parameter in model.parameters())
            assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        model = _model(hvd.rank())
        hvd.broadcast_parameters(list(model.named_parameters()), root)
        assert all(parameter.equal(wanted[name]) for name, parameter in model.named_parameters())
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)


class Own:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@on_hvd_workers(3)
def test_objects_of_any_kind_travel() -> None:
    rank, size = hvd.rank(), hvd.size()
    objects: list[Callable[[int], Any]] = [
        lambda number: None,
        lambda number: number,
        lambda number: {"a": [number, (1.5, "b")], 3: {number}},
        lambda number: Own(number),
        lambda number: b"x" * (number * 1_000_000),
    ]
    for root in range(size):
        for make in objects:
            assert hvd.broadcast_object(make(rank), root) == make(root)
            assert hvd.broadcast_object(make(rank), root, name="named") == make(root)
    for make in objects:
        assert hvd.allgather_object(make(rank)) == [make(other) for other in range(size)]
        assert hvd.allgather_object(make(rank), name="named") == [make(other) for other in range(size)]
    assert hvd.broadcast_object(lambda x: x + rank, 1)(10) == 11
    assert [function(10) for function in hvd.allgather_object(lambda x: x + rank)] == [10 + r for r in range(size)]
    assert hvd.broadcast_object(torch.full((3,), float(rank)), 1).tolist() == [1.0] * 3
