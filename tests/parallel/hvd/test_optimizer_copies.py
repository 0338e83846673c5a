"""Copies of a DistributedOptimizer: by copy.deepcopy and pickle, with all options."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradients import new_parameters
from worker_group import on_hvd_workers, on_workers, run_in_workers

from lockstep import hvd

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


def _copies_train_as_the_original_does(name: str, how: str) -> None:
    hvd.init()
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


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_reduces_its_own_gradients(name: str, how: str) -> None:
    run_in_workers(2, lambda world: _copies_train_as_the_original_does(name, how))


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
