"""Scripts read and change gradients between backward() and step(), while the network is slow."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from gradients import backward, bits, gradient, grads, mean, new_parameters
from torch.nn.utils import clip_grad_norm_
from worker_group import on_hvd_workers

from lockstep import hvd
from lockstep.hvd.engine.transfers import Control
from lockstep.hvd.exceptions import HorovodInternalError

Tensor = torch.Tensor
SHAPES = ((700,), (30, 40), (2,), (500,))
ROUND_SECONDS = 0.03  # far longer than the script needs to reach its gradients


@pytest.fixture(autouse=True)
def slow_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take ROUND_SECONDS in the workers, which are forked from this process."""
    gather = Control._gather
    monkeypatch.setattr(Control, "_gather", lambda *arguments: (time.sleep(ROUND_SECONDS), gather(*arguments))[1])


def wrap(parameters: list[Tensor], kind: Any = torch.optim.SGD, options: Any = None, **arguments: Any) -> Any:
    names = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    return hvd.DistributedOptimizer(kind(parameters, lr=0.1, **(options or {})), names, **arguments)


def clip(parameters: list[Tensor]) -> None:
    clip_grad_norm_(parameters, 1.0)


def clip_data(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad.data.clamp_(-0.5, 0.5)


def replace(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad.sign()


def add_noise(parameters: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


@on_hvd_workers(
    2,
    change=[clip, clip_data, replace, add_noise],
    arguments=[
        *({}, {"groups": 99}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}, {"op": hvd.Sum})
    ],
)
def test_gradients_are_reduced_when_backward_returns(change: Any, arguments: dict[str, Any]) -> str:
    passes = arguments.get("backward_passes_per_step", 1)
    factor = passes * (2 if "op" in arguments else 1)
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, **arguments)
    for step in range(3):
        twins = [parameter.detach().clone() for parameter in parameters]
        for twin, expected in zip(twins, mean(parameters, [0, 1], step), strict=True):
            twin.grad = factor * expected
        optimizer.zero_grad()
        for _ in range(passes):
            backward(parameters, hvd.rank(), step)
        change(parameters)
        change(twins)
        tolerance = 1e-2 if "compression" in arguments else 1e-12
        if not (change is replace and "compression" in arguments):  # the sign of a tiny number
            torch.testing.assert_close(grads(parameters), grads(twins), rtol=tolerance, atol=tolerance)
        before = [parameter.grad.clone() for parameter in parameters]
        optimizer.step()
        assert all(map(torch.equal, grads(parameters), before))
    return bits(parameters)


def fail(_: Tensor) -> None:
    raise ValueError("midway")


def scaled_step(parameters: list[Tensor], optimizer: Any, scaler: Any, step: int, **how: Any) -> None:
    """Take a step in torch's usual order; `infinite` is the rank with an infinite gradient."""
    factor = math.inf if how.get("infinite") == hvd.rank() else 1.0
    left_out = how.get("left_out", ())
    terms = [
        (parameter * gradient(parameter, index, hvd.rank(), step)).sum() * (factor if index == 1 else 1.0)
        for index, parameter in enumerate(parameters)
        if index not in left_out
    ]
    optimizer.zero_grad()
    loss = scaler.scale(torch.stack(terms).sum() if terms else torch.zeros(()))
    if terms:
        loss.backward()
    if how.get("unscales"):
        scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, 1.0)
    scaler.step(optimizer)
    scaler.update()


@on_hvd_workers(
    2,
    unscales=[False, True],
    options=[{}, {"momentum": 0.9, "fused": True}],
    left_out=[(), (2,), "differs", "nothing on rank 1"],
)
def test_grad_scaler_needs_no_synchronize(unscales: bool, options: dict[str, Any], left_out: Any) -> str:
    """Gradients are missing on all workers, on one, or on a worker without a batch."""
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer = wrap(parameters, options=options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    without: Any = {"differs": (hvd.rank(),), "nothing on rank 1": range(4 * hvd.rank())}.get(left_out, left_out)
    taken = []
    for step in range(5):
        before = [parameter.detach().clone() for parameter in parameters]
        infinite = 0 if step in (1, 4) and left_out != "differs" else None
        scaled_step(parameters, optimizer, scaler, step, infinite=infinite, unscales=unscales, left_out=without)
        changed = [before_ - parameter.detach() for before_, parameter in zip(before, parameters, strict=True)]
        taken.append(any(part.any() for part in changed))
        if step == 0 and not unscales:
            wanted = [torch.zeros_like(parameter) for parameter in parameters]
            for rank in range(2):
                skipped = {"differs": (rank,), "nothing on rank 1": range(4 * rank)}.get(left_out, left_out)
                for index, parameter in enumerate(parameters):
                    if index not in skipped:
                        wanted[index] += 0.05 * gradient(parameter, index, rank, 0)
            torch.testing.assert_close(changed, wanted)
    optimizer.zero_grad()
    never = left_out == "differs"
    assert taken == ([True] * 5 if never else [True, False, True, True, False])
    assert scaler.get_scale() == (8.0 if never else 2.0)
    return bits(parameters)


@on_hvd_workers(2, fused=[False, True])
def test_adasum_skips_the_same_steps_on_all_workers(fused: bool) -> str:
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer = wrap(parameters, options={"fused": fused}, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    taken = []
    for step in range(4):
        before = bits(parameters)
        scaled_step(parameters, optimizer, scaler, step, infinite=1 if step == 2 else None)
        taken.append(bits(parameters) != before)
    assert taken == [True, True, False, True]
    assert scaler.get_scale() == 4.0
    return bits(parameters)


@on_hvd_workers(2)
def test_grad_scaler_after_synchronize_reduces_once() -> str:
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer = wrap(parameters, op=hvd.Sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for order in range(3):
        optimizer.zero_grad()
        scaler.scale(torch.stack([parameter.sum() for parameter in parameters]).sum()).backward()
        if order == 1:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        if order == 2:
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert all(bool((parameter.grad == 2).all()) for parameter in parameters)
    return bits(parameters)


@on_hvd_workers(2, left_out=[(2,), "differs"])
def test_changing_gradients_before_all_are_reduced_raises(left_out: Any) -> str:
    """A bucket lacks a gradient until step(), so the others in it are this worker's own."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters)
    without = (hvd.rank(),) if left_out == "differs" else left_out
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 0, without)
    clip(parameters)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 0, without)
    optimizer.synchronize()
    clip(parameters)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert "optimizer.synchronize()" in str(caught.value)
    assert f"'p{without[0]}', which has no gradient on this worker" in str(caught.value)
    return bits(parameters)


@on_hvd_workers(2)
def test_sparse_gradients_are_reduced_before_the_scaler_reads() -> str:
    torch.manual_seed(0)
    table = torch.nn.Embedding(9, 4, sparse=True)
    optimizer = wrap([table.weight, *new_parameters(SHAPES[:1], torch.float32)])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad()
        factor = math.inf if step == 2 and hvd.rank() == 1 else 1.0
        scaler.scale(factor * table(torch.tensor([hvd.rank(), 5])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    return bits([table.weight])


@on_hvd_workers(2)
def test_hooks_added_after_wrapping_run_before_the_reduction() -> str:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)

    def change(parameter: Tensor) -> None:
        parameter.grad *= 1 + hvd.rank()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(change)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step)
        for index, parameter in enumerate(parameters):
            wanted = (gradient(parameter, index, 0, step) + 2 * gradient(parameter, index, 1, step)) / 2
            torch.testing.assert_close(parameter.grad, wanted)
        optimizer.step()
    return bits(parameters)


@on_hvd_workers(2, 3, without=["some gradients", "backward"])
def test_collective_before_step_may_precede_missing_gradients(size: int, without: str) -> str:
    """Rank 0 waits for a gradient that the last rank lacks, and that rank waits for rank 0 in a collective."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)
    for step in range(3):
        optimizer.zero_grad()
        is_last = hvd.rank() == size - 1
        if not is_last:
            backward(parameters, hvd.rank(), step)
        elif without == "some gradients":
            backward(parameters, hvd.rank(), step, (1, 3))
        assert hvd.allreduce(torch.tensor(float(hvd.rank())), name="figure", op=hvd.Sum) == sum(range(size))
        optimizer.step()
        for index, parameter in enumerate(parameters):
            lacks = without == "backward" or index in (1, 3)
            ranks = range(size - 1) if lacks else range(size)
            wanted = sum(gradient(parameter, index, rank, step) for rank in ranks) / size
            torch.testing.assert_close(parameter.grad, wanted)
    return bits(parameters)


@on_hvd_workers(2)
def test_gradients_given_back_and_changed_raise() -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 0, (1,) if hvd.rank() else ())
    hvd.allreduce(torch.tensor(1.0), name="figure")
    if hvd.rank() == 0:
        clip(parameters)
    with pytest.raises((RuntimeError, HorovodInternalError)) as error:
        optimizer.step()
    if hvd.rank() == 0:
        assert "was changed between backward()" in str(error.value)
        assert "gradients that other workers do not have before step()" in str(error.value)
    else:
        assert "rank 0 called hvd.shutdown()" in str(error.value)
    hvd.shutdown()


@on_hvd_workers(2, late=[False, True])
def test_sparse_and_dense_gradients_in_one_bucket(late: bool) -> str:
    torch.manual_seed(0)
    table = torch.nn.Embedding(9, 4, sparse=True)
    dense = new_parameters(SHAPES[:2], torch.float32)
    optimizer = wrap([table.weight, *dense])
    for step in range(3):
        optimizer.zero_grad()
        terms = [(p * gradient(p, index, hvd.rank(), step)).sum() for index, p in enumerate(dense)]
        (table(torch.tensor([hvd.rank(), 5])).sum() + sum(terms)).backward()
        if late:
            time.sleep(5 * ROUND_SECONDS)  # until what could be reduced is
        optimizer.step()
        torch.testing.assert_close(grads(dense), mean(dense, [0, 1], step))
    return bits([table.weight, *dense])


@on_hvd_workers(2)
def test_lost_worker_is_reported_though_gradients_were_changed() -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)

    def train() -> None:
        backward(parameters, 0)
        clip(parameters)
        optimizer.step()

    hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1)  # while the other waits at the end of its backward pass
    else:
        with pytest.raises(HorovodInternalError, match=r"rank 1 called hvd.shutdown\(\)"):
            train()
    hvd.shutdown()


@on_hvd_workers(2, groups=[None, 99])
def test_parameters_frozen_in_turn_within_a_step(groups: int | None) -> str:
    """As with one optimizer for a generator and a discriminator."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=groups)
    for step in range(3):
        for frozen in ((0, 1), (2, 3)):
            for index, parameter in enumerate(parameters):
                parameter.requires_grad_(index not in frozen)
            if frozen == (0, 1):
                optimizer.zero_grad()
            backward(parameters, hvd.rank(), step, frozen)
        optimizer.step()
        torch.testing.assert_close(grads(parameters), mean(parameters, [0, 1], step))
    return bits(parameters)


@on_hvd_workers(2, how=["unfreeze", "add_param_group"])
def test_new_parameters_are_reduced_in_their_first_step(how: str) -> str:
    parameters = new_parameters(SHAPES)
    parameters[0].requires_grad_(how != "unfreeze")
    optimizer = wrap(parameters if how == "unfreeze" else parameters[1:])
    for step in range(3):
        if step == 1 and how == "unfreeze":
            parameters[0].requires_grad_()
        elif step == 1:
            optimizer.add_param_group({"params": [parameters[0]]})
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step, () if step else (0,))
        clip([parameter for parameter in parameters if parameter.grad is not None])
        optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_changes_raise_if_a_worker_has_no_batch() -> None:
    """The worker without a batch changes nothing, since it has no gradients before step()."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        backward(parameters, 0)
        clip(parameters)
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match=r"gradients that other workers do not have before step\(\)"):
            optimizer.step()
    else:
        optimizer.step()


@on_hvd_workers(2)
def test_changes_between_backward_passes_raise() -> str:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=2)
    backward(parameters, hvd.rank(), 0, (3,))
    clip([parameter for parameter in parameters if parameter.grad is not None])
    backward(parameters, hvd.rank(), 0, (0, 1, 2))
    with pytest.raises(RuntimeError, match=r"was changed between backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    backward(parameters, hvd.rank())
    optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_later_pass_may_fail_and_the_step_be_taken() -> str:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, backward_passes_per_step=2)
    backward(parameters, hvd.rank())

    hook = parameters[0].register_hook(fail)
    with pytest.raises(ValueError, match="midway"):
        backward(parameters, hvd.rank())
    hook.remove()
    optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_changes_in_an_incomplete_accumulation_raise() -> None:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, backward_passes_per_step=4)
    backward(parameters, hvd.rank())
    clip(parameters)
    with pytest.raises(RuntimeError, match="has had fewer than backward_passes_per_step backward passes"):
        optimizer.step()


@on_hvd_workers(2)
def test_optimizer_may_have_a_property_for_its_groups() -> str:
    class Grouped(torch.optim.SGD):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.groups = self.named_parameters = None  # names that an optimizer may use for something else

        @property
        def param_groups(self) -> Any:
            return self._groups

        @param_groups.setter
        def param_groups(self, groups: Any) -> None:
            self._groups = groups

    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, Grouped)
    backward(parameters, hvd.rank())
    clip(parameters)
    optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_adasum_with_a_scaler_goes_on_after_a_worker_has_joined() -> None:
    parameters = new_parameters(SHAPES, torch.float32)
    optimizer = wrap(parameters, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    taken = []
    for step in range(2 if hvd.rank() else 4):
        before = bits(parameters)
        scaled_step(parameters, optimizer, scaler, step)
        taken.append(bits(parameters) != before)
    hvd.join()
    assert taken == [True] * (2 if hvd.rank() else 4)


@on_hvd_workers(2)
def test_towers_with_own_backward_passes_are_reduced_in_turn() -> str:
    """A worker that is still computing its second pass is waited for, also if it is late."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)
    for step in range(2):
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step, (2, 3))
        if hvd.rank() == step:
            time.sleep(10 * ROUND_SECONDS)
        backward(parameters, hvd.rank(), step, (0, 1))
        torch.testing.assert_close(grads(parameters), mean(parameters, [0, 1], step))
        clip(parameters)
        optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_frozen_parameters_do_not_delay_the_reduction() -> str:
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters)
    for step in range(4):
        parameters[1].requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step, () if step % 2 == 0 else (1,))
        clip(parameters)
        optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_reentrant_checkpoints_are_reduced_when_backward_returns() -> str:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(20, 20).double() for _ in range(4)])
    optimizer = wrap(list(layers.parameters()), groups=4)
    inputs = torch.full((3, 20), 1.0 + hvd.rank(), dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        values = inputs
        for layer in layers:
            values = checkpoint(layer, values, use_reentrant=True)
        values.square().sum().backward()
        clip(list(layers.parameters()))
        optimizer.step()
    return bits(layers.parameters())


@on_hvd_workers(2)
def test_backward_that_fails_midway_can_be_finished() -> str:
    """Autograd then does not report the end of the pass."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)

    hook = parameters[0].register_hook(fail)
    with pytest.raises(ValueError, match="midway"):
        backward(parameters, hvd.rank())
    hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 1)
    clip(parameters)
    optimizer.step()
    return bits(parameters)


@on_hvd_workers(2)
def test_compiled_autograd_reduces_in_step(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(torch._dynamo.config, "compiled_autograd", True)
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=2)

    @torch.compile(backend="eager")
    def step() -> None:
        torch.stack([parameter.sum() * (1 + hvd.rank()) for parameter in parameters]).sum().backward()

    for _ in range(2):
        optimizer.zero_grad()
        step()
        optimizer.step()
        assert all(bool((parameter.grad == 1.5).all()) for parameter in parameters)
    return bits(parameters)


@on_hvd_workers(2)
def test_backward_that_fails_midway_may_be_given_back() -> str:
    """Each worker waits in step() for gradients that only the other one has computed before its failure."""
    parameters = new_parameters(SHAPES)
    optimizer = wrap(parameters, groups=99)

    optimizer.zero_grad()
    backward(parameters, hvd.rank(), 0, (0, 1) if hvd.rank() else (2, 3))
    failing = torch.ones(1, requires_grad=True)
    failing.register_hook(fail)
    with pytest.raises(ValueError, match="midway"):
        (failing.sum() + sum(parameters[index].sum() for index in ((0, 1) if hvd.rank() else (2, 3)))).backward()
    optimizer.step()
    return bits(parameters)
