"""What DistributedOptimizer makes of the workers' gradients, under all its options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradients import SHAPES, backward, bits, close, gradient, grads, mean, new_parameters, wrap
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd
from lockstep.hvd.compression import Compressor

Tensor = torch.Tensor


class Tenth(Compressor):
    """A user's compression: tenths, as whole numbers."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor * 10).round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) / 10


def reduced(parameters: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """All workers' gradients, reduced from [workers, ...]."""
    ranks = range(hvd.size())
    return [
        reduce(torch.stack([gradient(parameter, index, rank) for rank in ranks]))
        for index, parameter in enumerate(parameters)
    ]


# Arguments made from the parameters, how the gradients are reduced over the workers, and to what precision.
OPTIONS: dict[str, tuple[Callable[[list[Tensor]], dict[str, Any]], Callable[[Tensor], Tensor], float]] = {
    "nothing": (lambda p: {}, lambda g: g.mean(0), 1e-12),
    "names": (lambda p: {"named_parameters": zip("abcdefg", p, strict=True)}, lambda g: g.mean(0), 1e-12),
    "Sum": (lambda p: {"op": hvd.Sum}, lambda g: g.sum(0), 1e-12),
    "Min": (lambda p: {"op": hvd.Min}, lambda g: g.amin(0), 0),
    "Max": (lambda p: {"op": hvd.Max}, lambda g: g.amax(0), 0),
    "Product": (lambda p: {"op": hvd.Product}, lambda g: g.prod(0), 1e-12),
    "predivide": (lambda p: {"gradient_predivide_factor": 3.0}, lambda g: g.mean(0), 1e-12),
    "fp16": (lambda p: {"compression": hvd.Compression.fp16}, lambda g: g.mean(0), 3e-3),
    "no compression": (lambda p: {"compression": None}, lambda g: g.mean(0), 1e-12),
    "own compression": (lambda p: {"compression": Tenth}, lambda g: (g * 10).round().sum(0), 1e-12),
    "one group": (lambda p: {"groups": 1}, lambda g: g.mean(0), 1e-12),
    "two groups": (lambda p: {"groups": 2}, lambda g: g.mean(0), 1e-12),
    "more groups than parameters": (lambda p: {"groups": 99}, lambda g: g.mean(0), 1e-12),
    "some in groups": (lambda p: {"groups": [[p[3], p[0]], [p[2]]]}, lambda g: g.mean(0), 1e-12),
    "groups with a stranger": (lambda p: {"groups": [[p[1], torch.zeros(2)]]}, lambda g: g.mean(0), 1e-12),
    "groups and fp16": (lambda p: {"groups": 3, "compression": hvd.Compression.fp16}, lambda g: g.mean(0), 3e-3),
}


@on_hvd_workers(2, 3)
def test_every_option_reduces_as_documented_on_all_workers() -> dict[str, str]:
    outcomes = {}
    for name, (arguments, reduce, tolerance) in OPTIONS.items():
        parameters = new_parameters()
        if "own" in name:  # truncates tenths as Average of whole numbers does
            reduce = lambda g: (g * 10).round().sum(0).div(hvd.size()).trunc() / 10  # noqa: E731
        optimizer = wrap(parameters, **arguments(parameters))
        for _ in range(2):
            optimizer.zero_grad()
            backward(parameters, hvd.rank())
            optimizer.synchronize()
            close(grads(parameters), reduced(parameters, reduce), tolerance)
            with optimizer.skip_synchronize():
                optimizer.step()
        outcomes[name] = bits(parameters)
    return outcomes


@on_workers(2, threshold_bytes=[0, 100, 6000])
def test_the_fusion_threshold_changes_no_result(threshold_bytes: int) -> None:
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(threshold_bytes)
    hvd.init()
    parameters = new_parameters()
    optimizer = wrap(parameters)
    for step in range(3):
        optimizer.zero_grad()
        backward(parameters, hvd.rank(), step)
        optimizer.synchronize()
        close(grads(parameters), mean(parameters, range(hvd.size()), step))
    hvd.shutdown()


@on_hvd_workers(2)
def test_all_dtypes_and_an_oversized_bucket_train_together() -> str:
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    parameters = [parameter for dtype in kinds for parameter in new_parameters(dtype=dtype)]
    parameters += new_parameters([(300_000,), (1200, 1000)], torch.float32)
    optimizer = wrap(parameters)
    backward(parameters, hvd.rank())
    optimizer.step()
    for parameter, expected in zip(parameters, mean(parameters, range(hvd.size())), strict=True):
        close(parameter.grad, expected, 1e-12 if parameter.dtype == torch.float64 else 2e-2)
    return bits([parameter.float() for parameter in parameters])


@on_hvd_workers(2, compression=[hvd.Compression.none, hvd.Compression.fp16, Tenth], op=[hvd.Average, hvd.Sum])
def test_complex_parameters_train_with_real_ones(compression: type[Compressor], op: int) -> str:
    """Also if a gradient is stored conjugated or negated, missing on a worker, or has a graph."""
    rank, factor = hvd.rank(), 1 if op == hvd.Average else hvd.size()
    kinds = (torch.complex128, torch.complex64, torch.float64)
    plain, conjugated, missing = (torch.ones(4, dtype=kind, requires_grad=True) for kind in kinds)
    optimizer = wrap([plain, conjugated, missing], compression=compression, op=op)
    for has_graph in (True, False):
        optimizer.zero_grad()
        weight = torch.full((4,), complex(rank + 1, -2), dtype=plain.dtype)
        loss = (plain * weight + conjugated.conj() * weight).real.sum()
        if rank:
            loss = loss + torch.complex(missing, missing).conj().imag.sum()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
            loss.backward(create_graph=has_graph)
        optimizer.step()
        close(plain.grad, torch.full_like(plain, complex(1.5, 2) * factor))
        close(conjugated.grad, torch.full_like(conjugated, complex(1.5, -2) * factor))
        close(missing.grad, torch.full_like(missing, -0.5 * factor))
    return bits([plain, conjugated, missing])


@on_hvd_workers(2)
def test_gradients_add_up_over_backward_passes_without_division() -> None:
    parameters = new_parameters()
    optimizer = wrap(parameters, backward_passes_per_step=2)
    for passes in (2, 2, 3, 1):
        optimizer.set_backward_passes_per_step(passes)
        for step in range(passes):
            backward(parameters, hvd.rank(), step)
        optimizer.synchronize()
        terms = zip(*[mean(parameters, range(hvd.size()), step) for step in range(passes)], strict=True)
        close(grads(parameters), [torch.stack(term).sum(0) for term in terms])
        optimizer.zero_grad(set_to_none=passes == 3)
    optimizer.set_backward_passes_per_step(4)
    for step in range(2):  # fewer than announced: the step takes what there is
        backward(parameters, hvd.rank(), step)
    optimizer.step()
    terms = zip(*[mean(parameters, range(hvd.size()), step) for step in range(2)], strict=True)
    close(grads(parameters), [torch.stack(term).sum(0) for term in terms])


@on_hvd_workers(2)
def test_parameters_may_be_frozen_thawed_and_added() -> str:
    ranks = range(hvd.size())
    parameters = new_parameters()
    parameters[1].requires_grad_(False)
    optimizer = wrap(parameters, lr=1.0, named_parameters=list(zip("abcdefg", parameters, strict=True)))
    late = new_parameters([(4,), (9, 100)])
    for frozen in ([1], [1], [], [0, 3], [2], []):
        if frozen == [0, 3]:
            optimizer.add_param_group({"params": late[0], "lr": 0.5})
            optimizer.add_param_group({"params": late[1]})
            parameters += late
        for index, parameter in enumerate(parameters):
            parameter.requires_grad_(index not in frozen)
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in parameters]
        backward(parameters, hvd.rank(), left_out=frozen)
        optimizer.step()
        for index, (parameter, start) in enumerate(zip(parameters, before, strict=True)):
            rate = 0.0 if index in frozen else 0.5 if parameter is late[0] else 1.0
            close(parameter.detach(), start - rate * mean(parameters, ranks)[index])
    return bits(parameters)


@on_hvd_workers(2)
def test_generator_and_discriminator_of_same_names_alternate() -> str:
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    optimizers = [wrap(list(m.parameters()), named_parameters=m.named_parameters()) for m in models]
    torch.manual_seed(hvd.rank())
    for trained in ((True, False), (False, True), (True, True), (True, False)):
        for model, optimizer, trains in zip(models, optimizers, trained, strict=True):
            model.requires_grad_(trains)
            optimizer.zero_grad()
        models[1](models[0](torch.randn(4, 3))).square().sum().backward()
        for model, optimizer, trains in reversed(list(zip(models, optimizers, trained, strict=True))):
            assert all((parameter.grad is not None) == trains for parameter in model.parameters())
            if trains:
                optimizer.step()
    return bits([*models[0].parameters(), *models[1].parameters()])


@on_workers(3)
def test_only_members_of_a_process_set_reduce_in_it() -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    alone, shared = new_parameters(), new_parameters()
    some = wrap(alone, process_set=pair, named_parameters=list(zip("abcdefg", alone, strict=True)))
    every = wrap(shared, named_parameters=list(zip("abcdefg", shared, strict=True)))
    for step in range(2):
        some.zero_grad()
        every.zero_grad()
        backward(alone, hvd.rank(), step)
        backward(shared, hvd.rank(), step)
        every.step()
        some.step()
        close(grads(alone), mean(alone, [0, 2] if hvd.rank() != 1 else [1], step))
        close(grads(shared), mean(shared, range(3), step))
    with pytest.raises(NotImplementedError):
        wrap(alone[:2], op=hvd.Adasum, process_set=pair)
    hvd.shutdown()


@on_hvd_workers(2, 3, as_dense=[False, True])
def test_sparse_gradients_are_reduced_as_they_are_or_as_dense(as_dense: bool) -> None:
    """Embeddings with sparse gradients among dense parameters, in the same groups and out of step."""
    torch.manual_seed(0)
    tables = [torch.nn.Embedding(6, 3, sparse=True, dtype=torch.float64) for _ in range(3)]
    dense = new_parameters()
    parameters = [tables[0].weight, *dense[:3], tables[1].weight, *dense[3:], tables[2].weight]
    optimizer = wrap(parameters, groups=2, sparse_as_dense=as_dense)
    for step in range(3):
        optimizer.zero_grad()
        rows = [torch.tensor([rank, 2, 2, (5 + step) % 6]) for rank in range(hvd.size())]
        used = tables if step != 1 else tables[1:] if hvd.rank() == 0 else []  # in one step only on rank 0
        sum((table(rows[hvd.rank()]).sum() for table in used), torch.zeros(())).backward() if used else None
        backward(dense, hvd.rank(), step)
        optimizer.step()
        close(grads(dense), mean(dense, range(hvd.size()), step))
        for number, table in enumerate(tables):
            expected = torch.zeros_like(table.weight)
            for rank in range(hvd.size()):
                if step != 1 or (rank == 0 and number > 0):
                    expected.index_add_(0, rows[rank], torch.ones(4, 3, dtype=torch.float64) / hvd.size())
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse or as_dense
            close(table.weight.grad.to_dense(), expected)


@on_hvd_workers(2, layout=["channels_last", "transposed"])
def test_gradients_of_any_memory_layout_are_reduced(layout: str) -> None:
    (dense,) = new_parameters([(16, 8, 5, 5)])
    strided = dense.to(memory_format=torch.channels_last) if layout == "channels_last" else dense.mT.contiguous().mT
    parameter = strided.detach().requires_grad_()
    optimizer = wrap([parameter])
    for step in range(2):
        optimizer.zero_grad()
        backward([parameter], hvd.rank(), step)
        assert parameter.grad.stride() == parameter.stride() != dense.stride()
        optimizer.step()
        close(parameter.grad, mean([parameter], range(hvd.size()), step)[0])


@on_hvd_workers(2)
def test_gradients_that_have_a_graph_are_reduced() -> None:
    for shapes in ([(3,)], SHAPES):
        parameters = new_parameters(shapes)
        for arguments in ({}, {"compression": hvd.Compression.fp16}):
            optimizer = wrap(parameters, **arguments)
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
                terms = [
                    (parameter * gradient(parameter, index, hvd.rank())).sum()
                    for index, parameter in enumerate(parameters)
                ]
                (torch.stack(terms).sum() + sum(p.square().sum() for p in parameters)).backward(create_graph=True)
            optimizer.step()
            starts = zip(new_parameters(shapes), mean(parameters, range(hvd.size())), strict=True)
            if not arguments:
                close([parameter.grad for parameter in parameters], [2 * start + g for start, g in starts])
