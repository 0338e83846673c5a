"""Attributes, manual reductions and copies of DistributedOptimizer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import backward, gradient, mean, new_parameters, wrap
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd

Tensor = torch.Tensor


@on_hvd_workers(2)
def test_every_worker_has_the_same_names_in_the_same_order() -> None:
    parameters = new_parameters()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    nameless = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1))
    named = wrap(parameters, named_parameters=zip("gfedcba", parameters, strict=True))
    adasum = wrap(parameters, op=hvd.Adasum)
    indices = {parameter: index for index, parameter in enumerate(parameters)}
    first, second, third = (
        [(indices[parameter], name) for parameter, name in each._parameter_names.items()]
        for each in (nameless, named, adasum)
    )
    assert first == [(0, "allreduce.noname.0.0"), (1, "allreduce.noname.0.1")] + [
        (2 + index, f"allreduce.noname.1.{index}") for index in range(5)
    ]
    assert second == list(zip(range(6, -1, -1), "abcdefg", strict=True))
    assert [index for index, _ in third] == list(range(7))


@on_workers(3)
def test_what_it_was_made_with_can_be_read() -> None:
    hvd.init(process_sets=[pair := hvd.ProcessSet([0, 1])])
    parameters = new_parameters()
    parameters[0].requires_grad_(False)
    given = {"gradient_predivide_factor": 2.0, "backward_passes_per_step": 3, "sparse_as_dense": True}
    optimizer = wrap(parameters, process_set=pair, **given)
    assert {name: getattr(optimizer, name) for name in given} == given
    assert (optimizer.op, optimizer.process_set) == (hvd.Average, pair)
    assert optimizer._requires_update == set(parameters[1:])
    assert (optimizer._compression, optimizer._should_synchronize) == (hvd.Compression.none, True)
    adasum = wrap(parameters, op=hvd.Adasum, backward_passes_per_step=2)
    assert (adasum.backward_passes_per_step, adasum._requires_update) == (2, set(parameters[1:]))
    assert not adasum._handles
    assert not [name for name in ("op", "process_set", "gradient_predivide_factor") if hasattr(adasum, name)]
    hvd.shutdown()


@pytest.mark.parametrize("scales", [False, True])
@on_hvd_workers(2)
def test_parameters_excepted_from_updates_keep_no_gradient(scales: bool) -> None:
    by_all, by_one, unused = parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    groups = [[by_all, by_one], [unused]]  # one worker has all gradients of the first when its backward pass ends
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1, weight_decay=1), groups=groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=4, enabled=scales)
    for excepted in (parameters, []):
        optimizer._requires_update = set(excepted)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        scaler.scale((by_all * (2 + by_one if hvd.rank() else 1)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [parameter.grad is None for parameter in parameters] == [False, False, not excepted]
        assert [hvd.allgather(each.detach()[None]).unique(dim=0).shape[0] for each in parameters] == [1, 1, 1]
    assert unused.tolist() == [0, 0]  # decayed once, to 0
    unused.data += 3
    optimizer.step()
    assert unused.tolist() == [3, 3]
    assert copy.deepcopy(optimizer)._requires_update == set()  # type: ignore[attr-defined]


@on_hvd_workers(2)
def test_setting_the_passes_is_the_same_as_the_method() -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters)
    for passes in (2, 3, 1):
        optimizer.backward_passes_per_step = passes
        assert optimizer.backward_passes_per_step == passes
        for _ in range(passes):
            backward(parameters, hvd.rank())
        assert all(handle is not None for handle, _ in optimizer._handles.values())
        optimizer.step()
        expected = mean(parameters, range(hvd.size()))
        torch.testing.assert_close([p.grad for p in parameters], [passes * grad for grad in expected])
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="must be > 0, got 0"):
        optimizer.backward_passes_per_step = 0


@on_hvd_workers(2)
def test_the_handles_are_there_from_the_gradient_to_the_step() -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters, backward_passes_per_step=2, compression=hvd.Compression.fp16)
    assert optimizer._handles == {}
    backward(parameters, hvd.rank())
    assert optimizer._handles == dict.fromkeys(parameters, (None, None))
    backward(parameters, hvd.rank())
    assert optimizer._handles.keys() == set(parameters)
    waits = {parameter: wait for parameter, (wait, _) in optimizer._handles.items()}
    for parameter, expected in zip(parameters, mean(parameters, range(hvd.size())), strict=True):
        torch.testing.assert_close(waits[parameter](), 2 * expected, rtol=3e-3, atol=3e-3)
        assert waits[parameter]() is parameter.grad
    optimizer.synchronize()
    assert optimizer._handles == {}
    torch.testing.assert_close(
        [p.grad for p in parameters], [2 * grad for grad in mean(parameters, [0, 1])], rtol=3e-3, atol=3e-3
    )


KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "average": ({}, lambda stack: stack.mean(0)),
    "sum": ({"op": hvd.Sum}, lambda stack: stack.sum(0)),
    "predivide": ({"gradient_predivide_factor": 4.0}, lambda stack: stack.mean(0)),
    "fp16": ({"compression": hvd.Compression.fp16}, lambda stack: stack.mean(0)),
}


@on_hvd_workers(2, kind=KINDS)
def test_one_gradient_can_be_reduced_manually(kind: str) -> None:
    arguments, reduce = KINDS[kind]
    (parameter,) = new_parameters([(3, 4)])
    optimizer = wrap([parameter], **arguments)
    parameter.grad = gradient(parameter, 0, hvd.rank())
    handle, context = optimizer._allreduce_grad_async(parameter)
    reduced = optimizer._compression.decompress(hvd.synchronize(handle), context)
    expected = reduce(torch.stack([gradient(parameter, 0, rank) for rank in range(2)]))
    torch.testing.assert_close(reduced, expected, rtol=3e-3, atol=3e-3)
    parameter.grad = None
    handle, context = optimizer._allreduce_grad_async(parameter)
    assert not optimizer._compression.decompress(hvd.synchronize(handle), context).any()


@on_hvd_workers(2, as_dense=[False, True])
def test_sparse_gradient_can_be_reduced_manually(as_dense: bool) -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = wrap([embedding.weight], sparse_as_dense=as_dense)
    gradient = torch.zeros(5, 2)
    gradient[hvd.rank()] = 1.0
    embedding.weight.grad = gradient.to_sparse(1)
    handle, _ = optimizer._allreduce_grad_async(embedding.weight)
    reduced = handle() if callable(handle) else hvd.synchronize(handle)
    assert reduced.is_sparse is not as_dense
    assert reduced.to_dense().tolist() == [[0.5, 0.5]] * 2 + [[0.0, 0.0]] * 3


@on_hvd_workers(2)
def test_one_adasum_step_can_be_taken_manually() -> None:
    by_hand, usual = new_parameters([(3, 4), (5,)]), new_parameters([(3, 4), (5,)])
    optimizers = [wrap(parameters, op=hvd.Adasum) for parameters in (by_hand, usual)]
    for parameters in (by_hand, usual):
        backward(parameters, hvd.rank())
    for parameter in by_hand:
        before = parameter.detach().clone()
        handle, _ = optimizers[0]._allreduce_grad_async(parameter)
        assert torch.equal(parameter, before)
        with torch.no_grad():
            parameter.add_(hvd.synchronize(handle))
    optimizers[1].step()
    torch.testing.assert_close(by_hand, usual)
    assert [len(group["params"]) for group in optimizers[0].param_groups] == [2]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
}

OPTIONS: dict[str, Callable[[list[torch.Tensor]], dict[str, Any]]] = {
    "nothing": lambda p: {},
    "names": lambda p: {"named_parameters": zip("gfedcba", p, strict=True)},
    "Sum": lambda p: {"op": hvd.Sum},
    "predivide": lambda p: {"gradient_predivide_factor": 3.0},
    "fp16": lambda p: {"compression": hvd.Compression.fp16},
    "some in groups": lambda p: {"groups": [[p[3], p[0]], [p[2]]]},
}


def _train(parameters: list[torch.Tensor], optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        sum(((parameter * (hvd.rank() + step + 1)) ** 2).sum() for parameter in parameters).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def _same_on_all(values: list[torch.Tensor]) -> bool:
    gathered = [hvd.allgather(value.reshape(1, -1)) for value in values]
    return all(bool((every == every[0]).all()) for every in gathered)


@on_hvd_workers(2, name=OPTIONS, how=COPIES)
def test_a_copy_reduces_its_own_gradients(name: str, how: str) -> None:
    parameters = new_parameters()
    optimizer: Any = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, **OPTIONS[name](parameters))
    _train(parameters, optimizer)
    own, copied = COPIES[how]((parameters, optimizer))
    assert all(one is other for one, other in zip(own, copied.param_groups[0]["params"], strict=True))
    assert copied.state.keys() == set(own)
    kept = [parameter.detach().clone() for parameter in parameters]
    moved = _train(own, copied)
    assert _same_on_all(moved)
    assert all(bool((one == other).all()) for one, other in zip(kept, parameters, strict=True))
    expected = _train(parameters, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(moved, expected, strict=True))


@on_hvd_workers(2)
def test_the_best_optimizer_is_kept_on_one_worker() -> None:
    parameters = new_parameters()
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.Adam(parameters, lr=0.01), op=hvd.Average)
    _train(parameters, optimizer)
    best = [copy.deepcopy(optimizer) for _ in range(3 if hvd.rank() == 0 else 0)]
    own, copied = copy.deepcopy((parameters, optimizer))
    assert _same_on_all(_train(own, copied))
    twice, again = copy.deepcopy((own, copied))
    assert _same_on_all(_train(twice, again))
    other: Any = hvd.DistributedOptimizer(torch.optim.SGD(more := new_parameters(), lr=0.01))
    assert _same_on_all(_train(more, other))
    assert len(best) in (0, 3)


@on_workers(4)
def test_a_copy_keeps_its_process_set_and_its_kind() -> None:
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    if hvd.rank() < 2:
        parameters = new_parameters()
        optimizer: Any = torch.optim.SGD(parameters, lr=0.01)
        optimizer = hvd.DistributedOptimizer(optimizer, process_set=pair, backward_passes_per_step=1)
        optimizer.set_backward_passes_per_step(2)
        _, copied = copy.deepcopy((parameters, optimizer))
        assert copied.process_set is pair
        assert copied.backward_passes_per_step == 2
    local: Any = hvd.DistributedOptimizer(torch.optim.SGD(new_parameters(), lr=0.01), op=hvd.Adasum)
    assert type(copy.deepcopy(local)).__mro__[1] is type(local).__mro__[1]
    scheduler = torch.optim.lr_scheduler.CyclicLR(local, 0.01, 0.1)
    pickle.loads(pickle.dumps(scheduler.state_dict()))
