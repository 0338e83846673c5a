"""DistributedOptimizer of a lone worker: what it is, what it refuses, and that it trains as the user's optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from lockstep import hvd
from lockstep.hvd.optimizer.gradient_optimizer import STEP_AFTER_SYNCHRONIZE


@pytest.fixture(autouse=True)
def horovod() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def backward(model: torch.nn.Module) -> None:
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()


class Halving(torch.optim.SGD):
    """A user's own class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(2)
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, Halving])
def test_it_is_an_instance_of_a_class_named_like_the_users(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind(new_model().parameters(), lr=0.1)
    distributed = hvd.DistributedOptimizer(optimizer)
    assert isinstance(distributed, kind)
    assert type(distributed) is not kind
    assert type(distributed).__name__ == kind.__name__
    assert type(distributed).__module__ == "horovod.torch.optimizer"
    assert type(optimizer) is kind


def test_it_shares_groups_and_state_with_the_users() -> None:
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    distributed = hvd.DistributedOptimizer(optimizer)
    backward(model)
    distributed.step()
    distributed.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    distributed.load_state_dict(copy.deepcopy(distributed.state_dict()))
    distributed.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups == distributed.param_groups
    assert optimizer.state == distributed.state
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 2


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Halving])
def test_alone_it_trains_as_the_users(kind: type[torch.optim.Optimizer]) -> None:
    models = [new_model(), new_model()]
    optimizers = [kind(model.parameters(), lr=0.1) for model in models]
    optimizers[1] = hvd.DistributedOptimizer(optimizers[1], models[1].named_parameters(), hvd.Compression.fp16)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"backward_passes_per_step": -2}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor not supported with op"),
        ({"groups": 0}, "groups should be"),
        ({"named_parameters": [torch.zeros(1)]}, "sequence of tuples"),
        ({"named_parameters": [("a", torch.zeros(1), 3)]}, "sequence of tuples"),
        ({"named_parameters": [("a", torch.zeros(1)), ("a", torch.ones(1))]}, "must be unique.*duplicates: a"),
        ({"named_parameters": [("a", torch.zeros(1))]}, r"not named: number 0 of group 0, shape \[2, 3\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(optimizer, **arguments)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum])
def test_complex_parameter_is_refused_by_name_unless_averaged(op: int) -> None:
    model = torch.nn.Linear(2, 2)
    model.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter 'phase' is complex.* use op=hvd\.Average"):
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=op)


def test_before_init_it_is_refused() -> None:
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
        hvd.DistributedOptimizer(torch.optim.SGD(new_model().parameters(), lr=0.1))


def test_an_unregistered_process_set_is_refused() -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=0.1)
    with pytest.raises(TypeError, match="is not registered"):
        hvd.DistributedOptimizer(optimizer, process_set=hvd.ProcessSet([0]))


def test_num_groups_warns() -> None:
    optimizer = torch.optim.SGD(new_model().parameters(), lr=0.1)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(optimizer, num_groups=2)


def test_a_plain_step_after_synchronize_warns_once() -> None:
    model = new_model()
    distributed: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model)
    distributed.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distributed.step()
        distributed.step()
    assert [(warning.category, str(warning.message)) for warning in caught] == [(UserWarning, STEP_AFTER_SYNCHRONIZE)]
    assert caught[0].filename == __file__


def test_a_step_that_skips_synchronize_does_not_warn() -> None:
    model = new_model()
    distributed: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        distributed.zero_grad(set_to_none=False)
        backward(model)
        distributed.synchronize()
        with distributed.skip_synchronize():
            distributed.step()


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_scheduler_made_before_or_after_works_without_warning(wrapped_first: bool) -> None:
    model = new_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    if wrapped_first:
        optimizer = hvd.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    if not wrapped_first:
        optimizer = hvd.DistributedOptimizer(optimizer)
    rates = []
    for _ in range(3):
        backward(model)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.load_state_dict(optimizer.state_dict())
    assert rates == [0.5, 0.25, 0.125]


def test_step_hooks_run_once() -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    distributed = hvd.DistributedOptimizer(optimizer)
    distributed.register_step_post_hook(lambda *_: calls.append("after"))
    backward(model)
    distributed.step()
    distributed.load_state_dict(distributed.state_dict())
    distributed.step()
    assert calls == ["before", "after"] * 2


def test_a_closure_is_called_and_its_loss_returned() -> None:
    model = new_model()
    distributed = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert distributed.step(lambda: 0.125) == 0.125
    assert distributed.step() is None


def test_the_state_can_be_copied_and_loaded_into_the_users_class() -> None:
    model = new_model()
    distributed = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    backward(model)
    distributed.step()
    saved = copy.deepcopy(distributed.state_dict())
    plain = torch.optim.Adam(model.parameters(), lr=9.0)
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        torch.testing.assert_close(plain.state[parameter], distributed.state[parameter], rtol=0, atol=0)
