"""Every collective, in every form, dtype, layout and size, gives what a slow reference computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from worker_group import on_hvd_workers

from lockstep import hvd

Tensor = torch.Tensor

WHOLE = (torch.int32, torch.int64)
REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *WHOLE)
MOVED = (
    *(*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool),
    *(torch.uint16, torch.uint64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
)
OPERATIONS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SCALES = ((1.0, 1.0), (0.5, 1.0), (1.0, 3.0), (2.5, 0.25))

INLINE, FUSED, ALONE = 24, 1200, 300_000  # elements: within a control message, in the fusion buffer, too large for it

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values,
    "scalar": lambda values: values[0],
    "no rows": lambda values: values[:0].view(0, 1),
    "no columns": lambda values: values[:0].view(2, 0),
    "transposed": lambda values: values.view(4, -1).t(),
    "expanded": lambda values: values[:3].view(3, 1).expand(3, 5),
    "every second": lambda values: values[::2],
    "one of a column": lambda values: values.view(-1, 4)[:1, 1],
    "channels last": lambda values: values.view(2, 2, 3, -1).to(memory_format=torch.channels_last),
}
WRITABLE = [layout for layout in LAYOUTS if layout != "expanded"]
WITH_ROWS = [layout for layout in LAYOUTS if layout != "scalar"]


def values_of(rank: int, dtype: torch.dtype = torch.float32, count: int = INLINE, shift: int = 0) -> Tensor:
    """Small whole numbers, positive and negative, that tell ranks and places apart and are exact in any dtype."""
    numbers = (torch.arange(count) * (rank + 2) + shift + rank) % 7 - 3
    return numbers.abs().to(dtype) if dtype == torch.uint8 else numbers.to(dtype)


def reduced(inputs: Sequence[Tensor], op: int = hvd.Average, prescale: float = 1.0, postscale: float = 1.0) -> Tensor:
    """The reduction in float64, cut toward zero where the dtype is of whole numbers."""
    cut = (lambda tensor: tensor) if inputs[0].is_floating_point() else torch.trunc
    rows = torch.stack([cut(tensor.double() * prescale) for tensor in inputs])
    result = {
        hvd.Average: rows.sum(0) / len(rows),
        hvd.Sum: rows.sum(0),
        hvd.Min: rows.amin(0),
        hvd.Max: rows.amax(0),
        hvd.Product: rows.prod(0),
    }[op]
    return cut(result * postscale).to(inputs[0].dtype)


def assert_is(got: Any, wanted: Tensor, message: Any = "") -> None:
    assert type(got) is Tensor, message
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), message
    torch.testing.assert_close(got, wanted, msg=lambda text: f"{message}: {text}")


def wait(handle: Any) -> Any:
    assert isinstance(handle, int)
    return hvd.synchronize(handle)


ALLREDUCE: dict[str, Callable[..., Tensor]] = {
    "allreduce": hvd.allreduce,
    "allreduce_async": lambda tensor, **options: wait(hvd.allreduce_async(tensor, **options)),
    "grouped_allreduce": lambda tensor, **options: hvd.grouped_allreduce([tensor], **options)[0],
    "grouped_allreduce_async": lambda tensor, **options: wait(hvd.grouped_allreduce_async([tensor], **options))[0],
    "allreduce_": hvd.allreduce_,
    "allreduce_async_": lambda tensor, **options: wait(hvd.allreduce_async_(tensor, **options)),
    "grouped_allreduce_": lambda tensor, **options: hvd.grouped_allreduce_([tensor], **options)[0],
    "grouped_allreduce_async_": lambda tensor, **options: wait(hvd.grouped_allreduce_async_([tensor], **options))[0],
}
BROADCAST: dict[str, Callable[..., Tensor]] = {
    "broadcast": hvd.broadcast,
    "broadcast_async": lambda *arguments: wait(hvd.broadcast_async(*arguments)),
    "broadcast_": hvd.broadcast_,
    "broadcast_async_": lambda *arguments: wait(hvd.broadcast_async_(*arguments)),
}
ALLGATHER: dict[str, Callable[..., Tensor]] = {
    "allgather": hvd.allgather,
    "allgather_async": lambda tensor: wait(hvd.allgather_async(tensor)),
    "grouped_allgather": lambda tensor: hvd.grouped_allgather([tensor])[0],
    "grouped_allgather_async": lambda tensor: wait(hvd.grouped_allgather_async([tensor]))[0],
}
REDUCESCATTER: dict[str, Callable[..., Tensor]] = {
    "reducescatter": hvd.reducescatter,
    "reducescatter_async": lambda tensor, **options: wait(hvd.reducescatter_async(tensor, **options)),
    "grouped_reducescatter": lambda tensor, **options: hvd.grouped_reducescatter([tensor], **options)[0],
    "grouped_reducescatter_async": lambda tensor, **options: wait(hvd.grouped_reducescatter_async([tensor], **options))[
        0
    ],
}


@on_hvd_workers(2, 3)
def test_allreduce_of_every_dtype_operation_scale_and_size(rank: int, size: int) -> None:
    for count in (INLINE, FUSED, ALONE):
        for dtype in REDUCED:
            inputs = [values_of(other, dtype, count) for other in range(size)]
            for op in OPERATIONS if count < ALONE else OPERATIONS[:1]:
                for prescale, postscale in SCALES if count < ALONE else SCALES[2:3]:
                    result = hvd.allreduce(inputs[rank], op=op, prescale_factor=prescale, postscale_factor=postscale)
                    assert_is(result, reduced(inputs, op, prescale, postscale), (count, dtype, op, prescale))
                    assert inputs[rank].equal(values_of(rank, dtype, count))


@on_hvd_workers(2, 3)
def test_allreduce_in_every_form_and_layout(rank: int, size: int) -> None:
    for form, call in ALLREDUCE.items():
        in_place = form.endswith("_")
        for layout in WRITABLE if in_place else LAYOUTS:
            for count in (INLINE, FUSED):
                inputs = [LAYOUTS[layout](values_of(other, count=count)) for other in range(size)]
                mine, before = inputs[rank], inputs[rank].clone()
                wanted = reduced(inputs, hvd.Sum, 2.0)
                result = call(mine, op=hvd.Sum, prescale_factor=2.0)
                assert_is(result, wanted, (form, layout, count))
                assert (result is mine) == in_place, (form, layout)
                assert mine.equal(wanted if in_place else before), (form, layout)
                assert in_place or result.is_contiguous(), (form, layout)


@on_hvd_workers(2)
def test_average_of_whole_numbers_is_cut_toward_zero(rank: int) -> None:
    for dtype in WHOLE:
        for count in (2, FUSED):
            mine = torch.tensor([2 + rank, -2 - rank], dtype=dtype).repeat(count // 2)
            assert hvd.allreduce(mine)[:2].tolist() == [2, -2]
            assert hvd.allreduce(mine, op=hvd.Sum)[:2].tolist() == [5, -5]
            assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5)[:2].tolist() == [2, -2], "1 + 1, each cut"
            assert hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.5)[:2].tolist() == [2, -2]
            assert hvd.reducescatter(mine.view(-1, 2).repeat(2, 1))[0].tolist() == [2, -2]


@on_hvd_workers(3)
def test_truth_values_are_reduced_to_any_or_all(rank: int, size: int) -> None:
    meaning = {hvd.Sum: any, hvd.Max: any, hvd.Min: all, hvd.Product: all, hvd.Average: all}
    for count in (INLINE, 4 * FUSED):
        inputs = [values_of(other, count=count) > other - 1 for other in range(size)]
        for op, said in meaning.items():
            wanted = torch.tensor([said(row) for row in torch.stack(inputs, 1).tolist()])
            assert_is(hvd.allreduce(inputs[rank], op=op), wanted, op)
            assert_is(hvd.allreduce_(inputs[rank].clone(), op=op), wanted, op)
            if op in (hvd.Average, hvd.Sum):
                assert_is(hvd.reducescatter(inputs[rank], op=op), wanted.tensor_split(size)[rank], op)


@on_hvd_workers(2, 3)
def test_groups_mix_dtypes_and_sizes(rank: int, size: int) -> None:
    def group_of(rank: int) -> list[Tensor]:
        group = [values_of(rank, dtype, 6 + index, shift=index) for index, dtype in enumerate(REDUCED)]
        return [
            *group,
            values_of(rank, count=ALONE),
            values_of(rank, count=FUSED).view(-1, 4),
            torch.tensor(rank + 1.0),
        ]

    by_rank = [group_of(other) for other in range(size)]
    wanted = [reduced(inputs, hvd.Max) for inputs in zip(*by_rank, strict=True)]
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
        result = call(group_of(rank), op=hvd.Max)
        assert type(result) is (list if call is hvd.grouped_allreduce else tuple)
        for got, want in zip(result, wanted, strict=True):
            assert_is(got, want)
    rows = by_rank[rank][:-1]
    for got, inputs in zip(hvd.grouped_allgather(rows), zip(*by_rank, strict=True), strict=False):
        assert_is(got, torch.cat(inputs))
    for got, inputs in zip(hvd.grouped_reducescatter(rows, op=hvd.Sum), zip(*by_rank, strict=True), strict=False):
        assert_is(got, reduced(inputs, hvd.Sum).tensor_split(size)[rank])


@on_hvd_workers(3)
def test_pending_operations_of_all_kinds_do_not_mix(rank: int, size: int) -> None:
    """Single tensors and groups of one, of several dtypes, operations and sizes, fused or not, all pending at once."""
    waiting = []
    for index in range(120):
        dtype, op = REDUCED[index % 6], OPERATIONS[index % 5]
        count = (3, 300, 1200)[index % 3]
        inputs = [values_of(other, dtype, count, shift=index) for other in range(size)]
        wanted = reduced(inputs, op, 1.0, 1.0 + index % 2)
        call = (hvd.allreduce_async, hvd.allreduce_async_)[index % 2]
        grouped = (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_)[index % 2]
        options = {"name": f"t{index}", "op": op, "postscale_factor": 1.0 + index % 2}
        if index % 4 == 3:
            waiting.append((grouped([inputs[rank]], **options), (wanted,)))
        else:
            waiting.append((call(inputs[rank], **options), wanted))
        if index % 10 == 0:
            waiting.append((hvd.broadcast_async(inputs[rank], 1, name=f"t{index}"), inputs[1]))
            waiting.append((hvd.allgather_async(inputs[rank], name=f"t{index}"), torch.cat(inputs)))
    for handle, wanted in waiting:
        result = wait(handle)
        assert type(result) is type(wanted)
        for got, want in zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, wanted)), strict=True):
            assert_is(got, want)


@on_hvd_workers(3)
def test_broadcast_of_every_dtype_layout_and_root(rank: int, size: int) -> None:
    for form, call in BROADCAST.items():
        in_place = form.endswith("_")
        for layout in WRITABLE if in_place else LAYOUTS:
            for root in range(size):
                mine, wanted = (LAYOUTS[layout](values_of(other)) for other in (rank, root))
                before = mine.clone()
                result = call(mine, root)
                assert_is(result, wanted, (form, layout, root))
                assert (result is mine) == in_place
                assert mine.equal(wanted if in_place else before)
        for dtype in MOVED:
            for count in (1, ALONE) if form == "broadcast_" else (1, FUSED):
                assert_is(call(values_of(rank, dtype, count), 1), values_of(1, dtype, count), (form, dtype))


@on_hvd_workers(3)
def test_allgather_of_every_dtype_layout_and_number_of_rows(rank: int, size: int) -> None:
    for form, call in ALLGATHER.items():
        for layout in WITH_ROWS:
            inputs = [LAYOUTS[layout](values_of(other)) for other in range(size)]
            assert_is(call(inputs[rank]), torch.cat(inputs), (form, layout))
        for dtype in MOVED:
            inputs = [values_of(other, dtype, 4 * other * other).view(-1, 2, 2) for other in range(size)]
            assert_is(call(inputs[rank]), torch.cat(inputs), (form, dtype))
        large = [values_of(other, count=ALONE // (other + 1)) for other in range(size)]
        assert_is(call(large[rank]), torch.cat(large))


@on_hvd_workers(3)
def test_alltoall_with_and_without_splits(rank: int, size: int) -> None:
    for dtype in MOVED:
        for count in (12, 12 * 30_000):
            inputs = [values_of(other, dtype, count).view(6, -1) for other in range(size)]
            wanted = torch.cat([tensor.chunk(size)[rank] for tensor in inputs])
            assert_is(hvd.alltoall(inputs[rank]), wanted)
            received, counts = wait(hvd.alltoall_async(inputs[rank]))
            assert_is(received, wanted)
            assert_is(counts, torch.tensor([6 // size] * size, dtype=torch.int32))
    # Uneven, some 0, and less than all: rank r sends (r + peer) % 3 rows to each peer.
    table = [[(other + peer) % 3 for peer in range(size)] for other in range(size)]
    splits = torch.tensor(table[rank], dtype=torch.int32)
    for layout in ("contiguous", "transposed", "every second", "channels last"):
        inputs = [LAYOUTS[layout](values_of(other, count=96)) for other in range(size)]
        if layout == "channels last":
            inputs = [tensor.permute(3, 0, 1, 2) for tensor in inputs]
        parts = [tensor[: sum(table[other])].split(table[other]) for other, tensor in enumerate(inputs)]
        for pair in (
            hvd.alltoall(inputs[rank], splits),
            hvd.alltoall(inputs[rank], table[rank]),
            wait(hvd.alltoall_async(inputs[rank], splits)),
        ):
            assert type(pair) is tuple
            assert_is(pair[0], torch.cat([part[rank] for part in parts]), layout)
            assert_is(pair[1], torch.tensor([row[rank] for row in table], dtype=torch.int32))
    assert_is(hvd.alltoall(torch.empty(0, 3)), torch.empty(0, 3))


@on_hvd_workers(3)
def test_reducescatter_of_every_dtype_layout_and_number_of_rows(rank: int, size: int) -> None:
    for form, call in REDUCESCATTER.items():
        for layout in WITH_ROWS:
            inputs = [LAYOUTS[layout](values_of(other)) for other in range(size)]
            wanted = reduced(inputs).tensor_split(size)[rank]
            assert_is(call(inputs[rank]), wanted, (form, layout))
        for dtype in REDUCED if form == "reducescatter" else WHOLE:
            for rows in (1, 2, 5, 7):
                inputs = [values_of(other, dtype, 2 * rows).view(rows, 2) for other in range(size)]
                for op in (hvd.Average, hvd.Sum):
                    for prescale, postscale in SCALES if form == "reducescatter" else SCALES[2:3]:
                        wanted = reduced(inputs, op, prescale, postscale).tensor_split(size)[rank]
                        result = call(inputs[rank], op=op, prescale_factor=prescale, postscale_factor=postscale)
                        assert_is(result, wanted, (form, dtype, rows, op, prescale))
        large = [values_of(other, count=ALONE + 1) for other in range(size)]
        assert_is(call(large[rank], op=hvd.Sum), reduced(large, hvd.Sum).tensor_split(size)[rank])
        assert large[rank].equal(values_of(rank, count=ALONE + 1))


@on_hvd_workers(2)
def test_results_have_the_documented_types() -> None:
    one, two = torch.ones(4), [torch.ones(4), torch.ones(2)]
    splits = torch.tensor([2, 2], dtype=torch.int32)
    results = {
        "allreduce": hvd.allreduce(one),
        "allreduce_async": wait(hvd.allreduce_async(one)),
        "grouped_allreduce": hvd.grouped_allreduce(two),
        "grouped_allreduce_": hvd.grouped_allreduce_(two),
        "grouped_allreduce_async": wait(hvd.grouped_allreduce_async(two)),
        "grouped_allreduce_async_": wait(hvd.grouped_allreduce_async_(two)),
        "grouped_allgather": hvd.grouped_allgather(two),
        "grouped_allgather_async": wait(hvd.grouped_allgather_async(two)),
        "grouped_reducescatter": hvd.grouped_reducescatter(two),
        "grouped_reducescatter_async": wait(hvd.grouped_reducescatter_async(two)),
        "alltoall": hvd.alltoall(one),
        "alltoall with splits": hvd.alltoall(one, splits),
        "alltoall_async": wait(hvd.alltoall_async(one)),
        "barrier": hvd.barrier(),
        "poll": hvd.poll(handle := hvd.allreduce_async(one)),
    }
    hvd.synchronize(handle)
    assert {name: type(result).__name__ for name, result in results.items()} == {
        "allreduce": "Tensor",
        "allreduce_async": "Tensor",
        "grouped_allreduce": "list",
        "grouped_allreduce_": "tuple",
        "grouped_allreduce_async": "tuple",
        "grouped_allreduce_async_": "tuple",
        "grouped_allgather": "tuple",
        "grouped_allgather_async": "tuple",
        "grouped_reducescatter": "list",
        "grouped_reducescatter_async": "tuple",
        "alltoall": "Tensor",
        "alltoall with splits": "tuple",
        "alltoall_async": "tuple",
        "barrier": "NoneType",
        "poll": "bool",
    }


@on_hvd_workers(2)
def test_results_and_inputs_are_free_to_be_changed() -> None:
    """No result shares its memory or autograd's count of changes with another, or with an input."""
    for count in (3, FUSED):
        inputs = [torch.ones(count), torch.ones(count)]
        weight = torch.full((count,), 3.0, requires_grad=True)
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            first, second = call([tensor.clone() for tensor in inputs])
            square = (second * weight[: len(second)] if len(second) <= count else second[:count] * weight).sum()
            first.add_(1)
            square.backward()
            assert (second == 1).all()
        result = hvd.allreduce(inputs[0])
        assert result.mul_(weight).requires_grad
        assert (inputs[0] == 1).all()


@on_hvd_workers(2)
def test_inference_tensors_and_lazy_negatives_are_reduced(rank: int) -> None:
    for count in (1, 3, FUSED):
        with torch.inference_mode():
            made = torch.full((count,), rank + 1.0)
            assert hvd.allreduce(made, op=hvd.Sum).tolist() == [3.0] * count
            hvd.allreduce_(made, op=hvd.Sum)
            assert made.tolist() == [3.0] * count
        column = torch.full((4, count), float(rank))
        with torch.inference_mode():
            transposed = column.clone().t()
            hvd.broadcast_(transposed, 1)
            assert (transposed == 1).all()
        negated = torch.complex(torch.zeros(count), torch.full((count,), rank + 1.0)).conj().imag
        assert negated.is_neg()
        assert hvd.allreduce(negated, op=hvd.Min).tolist() == [-2.0] * count
        assert hvd.allgather(negated).tolist() == [-1.0] * count + [-2.0] * count
        assert hvd.broadcast(negated, 1).tolist() == [-2.0] * count


@on_hvd_workers(2)
def test_numbers_may_be_of_any_kind_on_any_rank(rank: int) -> None:
    kinds: list[Callable[[int], Any]] = [int, float, np.float64, np.int64, torch.tensor]
    for shift in range(len(kinds)):
        factor = kinds[(rank + shift) % len(kinds)](2)
        assert hvd.allreduce(torch.ones(2), prescale_factor=factor).tolist() == [2.0, 2.0]
        assert hvd.reducescatter(torch.ones(2), postscale_factor=factor).tolist() == [2.0]
        root = (int, np.int64)[(rank + shift) % 2](1)
        assert hvd.broadcast(torch.tensor(rank), root).item() == 1


@on_hvd_workers(2)
def test_parameters_are_changed_in_place_without_gradient(rank: int, size: int) -> None:
    for count in (3, FUSED, ALONE):
        parameter = torch.nn.Parameter(torch.full((count,), float(rank)))
        assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
        assert hvd.broadcast_(parameter, 0) is parameter
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert (parameter == math.comb(size, 2)).all()


@on_hvd_workers(2)
def test_workers_may_differ_in_whether_they_work_in_place(rank: int) -> None:
    forms = (hvd.allreduce_async, hvd.allreduce_async_)
    groups = (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_)
    for count in (3, 300):
        inputs = [torch.full((count,), float(index)) for index in range(40)]
        singles = [forms[(i + rank) % 2](one.clone(), name=f"t{i}", op=hvd.Sum) for i, one in enumerate(inputs)]
        pairs = [groups[(i + rank) % 2]([one, one + 1], name=f"g{i}", op=hvd.Sum) for i, one in enumerate(inputs)]
        for index in range(40):
            assert wait(singles[index]).tolist() == [2.0 * index] * count
            assert [part.tolist()[0] for part in wait(pairs[index])] == [2.0 * index, 2.0 * index + 2]


@on_hvd_workers(2)
def test_sparse_tensors_stay_sparse(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int64):
        for entries in (0, 1, 5):
            count = entries * rank
            indices = torch.arange(count).repeat(2, 1) % 4
            mine = torch.sparse_coo_tensor(
                indices, torch.full((count,), 4 + rank, dtype=dtype), (4, 4), check_invariants=True
            )
            dense = hvd.allreduce(mine.to_dense(), op=hvd.Sum)
            total = hvd.sparse_allreduce_async(mine, f"sparse{entries}", hvd.Sum)()
            assert total.is_sparse
            assert total.to_dense().equal(dense)
            average = hvd.sparse_allreduce_async(mine, f"sparse{entries}", hvd.Average)()
            whole = None if dtype.is_floating_point else "trunc"
            assert average.dtype == dtype
            assert average.values().sum() <= dense.sum().div(size, rounding_mode=whole)
            if dtype.is_floating_point:
                assert average.to_dense().equal(dense / size)
    hybrid = torch.sparse_coo_tensor([[rank]], torch.full((1, 3), 2.0), (2, 3), check_invariants=True)
    assert hvd.sparse_allreduce_async(hybrid, "hybrid", hvd.Average)().to_dense().equal(torch.ones(2, 3))


@on_hvd_workers(2)
def test_fp16_compression_restores_the_dtype(rank: int) -> None:
    fp16 = hvd.Compression.fp16
    third = torch.full((5,), 1 / 3)
    assert_is(hvd.allreduce(third, compression=fp16), third.half().float())
    assert_is(hvd.reducescatter(third.double(), compression=fp16), third.half().double().tensor_split(2)[rank])
    one, two = hvd.grouped_allreduce([third, torch.tensor([70_000])], compression=fp16, op=hvd.Sum)
    assert_is(one, (2 * third.half()).float())
    assert_is(two, torch.tensor([140_000]))


@on_hvd_workers(2, 3)
def test_averages_in_half_precision_do_not_overflow() -> None:
    """Of numbers whose sum is beyond what half precision holds, 65,504, on every way that an average can take."""
    given = [torch.full((count,), 60_000.0, dtype=torch.float16) for count in (INLINE, FUSED, FUSED, 2 * ALONE)]
    results = [*hvd.grouped_allreduce(given[1:3]), *(hvd.allreduce(tensor) for tensor in given)]
    results.append(hvd.reducescatter(given[1]))
    results.append(hvd.allreduce(given[-1].float(), compression=hvd.Compression.fp16))
    for result in results:
        assert all(abs(float(extreme) - 60_000) < 100 for extreme in result.aminmax()), result
