"""Every error of Horovod's API: its class, its text, on which ranks, and that Horovod goes on working afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from worker_group import on_hvd_workers, on_workers

from lockstep import hvd
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world.world import World

NOT_INITIALIZED = r"Horovod has not been initialized; use hvd\.init\(\)\."
ONE, TWO = torch.ones(4), torch.ones(4, 2)
SPARSE = torch.eye(2).to_sparse()
UNSUPPORTED = (torch.complex64, torch.uint16, torch.uint32, torch.float8_e4m3fn)
SYNC: dict[str, Callable[[Any], Any]] = {
    "allreduce": hvd.allreduce,
    "allreduce_": hvd.allreduce_,
    "allreduce_async": hvd.allreduce_async,
    "grouped_allreduce": lambda value: hvd.grouped_allreduce([value]),
    "allgather": hvd.allgather,
    "broadcast": lambda value: hvd.broadcast(value, 0),
    "broadcast_": lambda value: hvd.broadcast_(value, 0),
    "alltoall": hvd.alltoall,
    "reducescatter": hvd.reducescatter,
}


def _splits(*rows: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


# Raised at once, on the rank that calls.
AT_ONCE: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    *(
        (f"{name} of {value!r}", lambda call=call, value=value: call(value), AttributeError, "")
        for name, call in SYNC.items()
        for value in ([1.0, 2.0, 3.0, 4.0], 3.0)
    ),
    *(
        (f"{name} of {dtype}", lambda call=call, dtype=dtype: call(ONE.to(dtype)), ValueError, r"Tensor type torch\.")
        for name, call in SYNC.items()
        if "reduce" in name  # the others move bytes
        for dtype in UNSUPPORTED
    ),
    *(
        (f"{name} of sparse", lambda call=call: call(SPARSE), ValueError, "is not supported")
        for name, call in SYNC.items()
    ),
    ("complex", lambda: hvd.allreduce(ONE.cfloat()), ValueError, "torch.ComplexFloatTensor is not supported"),
    ("allreduce of int8", lambda: hvd.allreduce(ONE.char()), ValueError, r"torch\.CharTensor is not supported"),
    (
        "reducescatter of uint8",
        lambda: hvd.reducescatter(ONE.byte()),
        ValueError,
        r"torch\.ByteTensor is not supported",
    ),
    ("meta", lambda: hvd.allreduce(ONE.to("meta")), ValueError, "is not supported"),
    ("expanded in place", lambda: hvd.allreduce_(ONE[:1].expand(3)), ValueError, "is required to be contiguous"),
    ("name", lambda: hvd.allreduce(ONE, name=5), AttributeError, ""),
    ("name", lambda: hvd.broadcast(ONE, 0, name=5), AttributeError, ""),
    ("op", lambda: hvd.allreduce(ONE, op="sum"), TypeError, ""),
    ("op", lambda: hvd.allreduce(ONE, op=99), HorovodInternalError, ""),
    ("op", lambda: hvd.allreduce(ONE, op=-1), HorovodInternalError, ""),
    (
        "root",
        lambda: hvd.broadcast(ONE, 7),
        ValueError,
        "broadcast received invalid root rank 7 for provided process set",
    ),
    ("root", lambda: hvd.broadcast_async_(ONE, -1), ValueError, "invalid root rank -1"),
    ("splits of int64", lambda: hvd.alltoall(ONE, _splits(2, 2, dtype=torch.int64)), ValueError, "splits"),
    ("splits 2-D", lambda: hvd.alltoall(ONE, _splits([2], [2])), ValueError, "splits"),
    ("splits of 3", lambda: hvd.alltoall(ONE, _splits(1, 1, 1)), ValueError, "split"),
    ("splits too large", lambda: hvd.alltoall(ONE, _splits(2, 3)), ValueError, "4 rows"),
    ("splits negative", lambda: hvd.alltoall_async(ONE, _splits(-1, 3)), ValueError, "splits"),
    ("rows not divisible", lambda: hvd.alltoall(ONE[:3]), ValueError, "cannot split 3 rows"),
    ("alltoall of a scalar", lambda: hvd.alltoall(ONE[0]), ValueError, "scalar"),
    ("allgather of a scalar", lambda: hvd.allgather(ONE[0]), IndexError, ""),
    ("reducescatter of a scalar", lambda: hvd.reducescatter(ONE[0]), ValueError, ""),
    ("no tensors", lambda: hvd.grouped_allreduce([]), ValueError, ""),
    ("no tensors", lambda: hvd.grouped_allreduce_async_([]), ValueError, ""),
    ("no tensors", lambda: hvd.grouped_allgather([]), ValueError, ""),
    ("no tensors", lambda: hvd.grouped_reducescatter([]), ValueError, ""),
    *(
        (
            f"reducescatter by {op}",
            lambda op=op: hvd.reducescatter(ONE, op=op),
            HorovodInternalError,
            "Reducescatter currently only supports AVERAGE and SUM.",
        )
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)
    ),
    ("poll", lambda: hvd.poll(10**9), ValueError, "Handle 1000000000 was not created or has been cleared."),
    ("unregistered", lambda: hvd.allreduce(ONE, process_set=hvd.ProcessSet([0])), TypeError, "not registered"),
    ("unregistered", lambda: hvd.alltoall(ONE, process_set=hvd.ProcessSet([0])), TypeError, "not registered"),
    ("unregistered", lambda: hvd.barrier(process_set=hvd.ProcessSet([0])), TypeError, "not registered"),
    ("start_timeline", lambda: hvd.start_timeline("/tmp/never.json"), ValueError, "HOROVOD_TIMELINE=DYNAMIC"),
    ("parameters", lambda: hvd.broadcast_parameters((ONE,), 0), ValueError, "invalid params of type"),
    ("parameters", lambda: hvd.broadcast_parameters(iter([ONE]), 0), ValueError, "invalid params of type"),
    ("parameters", lambda: hvd.broadcast_parameters({"lr": 0.1}, 0), AttributeError, ""),
    ("LBFGS", lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS([ONE.clone()]), 0), ValueError, "LBFGS"),
]

# Found by comparing the ranks: `odd` is 0 on all ranks but one.
COMPARED: list[tuple[str, Callable[[int], Any], str]] = [
    (
        "shape",
        lambda odd: hvd.allreduce_async(torch.ones(3 + odd)),
        r"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape \[[34]\], but another rank sent a tensor "
        r"of shape \[[34]\]\.",
    ),
    ("large shape", lambda odd: hvd.allreduce_async(torch.ones(3000 + odd)), "Mismatched ALLREDUCE tensor shapes"),
    ("in place", lambda odd: hvd.allreduce_async_(torch.ones(3 + odd)), "Mismatched ALLREDUCE tensor shapes"),
    ("ndim", lambda odd: hvd.allreduce_async(ONE[None] if odd else ONE), "Mismatched ALLREDUCE tensor shapes"),
    ("scalar", lambda odd: hvd.allreduce_async(ONE[0] if odd else ONE[:1]), "Mismatched ALLREDUCE tensor shapes"),
    (
        "dtype",
        lambda odd: hvd.allreduce_async(ONE.double() if odd else ONE),
        r"Mismatched data types: One rank had type float(32|64), but another rank had type float(32|64)\.",
    ),
    ("op", lambda odd: hvd.allreduce_async(ONE, op=hvd.Min if odd else hvd.Sum), "Mismatched reduction operation: "),
    (
        "prescale",
        lambda odd: hvd.allreduce_async(ONE, prescale_factor=1.0 + odd),
        "Mismatched prescale and/or postscale factors: ",
    ),
    (
        "postscale",
        lambda odd: hvd.allreduce_async(ONE, postscale_factor=1.0 + odd),
        "Mismatched prescale and/or postscale factors: ",
    ),
    ("group", lambda odd: hvd.grouped_allreduce_async([ONE] * (2 + odd)), "Mismatched ALLREDUCE group sizes"),
    (
        "group of one",
        lambda odd: hvd.grouped_allreduce_async([ONE]) if odd else hvd.allreduce_async(ONE),
        "Mismatched ALLREDUCE groups",
    ),
    ("in a group", lambda odd: hvd.grouped_allreduce_async([ONE, TWO[odd:]]), "Mismatched ALLREDUCE tensor shapes"),
    ("root", lambda odd: hvd.broadcast_async(ONE, odd), "Mismatched BROADCAST root ranks: "),
    ("shape", lambda odd: hvd.broadcast_async(TWO[odd:], 0), "Mismatched BROADCAST tensor shapes"),
    ("dtype", lambda odd: hvd.broadcast_async_(torch.ones(2).to(MIXED[odd]), 0), "Mismatched data types"),
    ("columns", lambda odd: hvd.allgather_async(torch.ones(2, 3 + odd)), "Mismatched ALLGATHER tensor shapes"),
    ("ndim", lambda odd: hvd.allgather_async(ONE[:, None] if odd else ONE), "Mismatched ALLGATHER tensor shapes"),
    ("dtype", lambda odd: hvd.allgather_async(ONE.to(MIXED[odd])), "Mismatched data types"),
    ("columns", lambda odd: hvd.alltoall_async(torch.ones(6, 3 + odd)), "Mismatched ALLTOALL tensor shapes"),
    ("ndim", lambda odd: hvd.alltoall_async(torch.ones(6, 1) if odd else torch.ones(6)), "Mismatched ALLTOALL"),
    ("dtype", lambda odd: hvd.alltoall_async(torch.ones(6).to(MIXED[odd])), "Mismatched data types"),
    ("rows", lambda odd: hvd.reducescatter_async(torch.ones(6 + odd)), "Mismatched REDUCESCATTER tensor shapes"),
    (
        "op",
        lambda odd: hvd.reducescatter_async(ONE, op=hvd.Sum if odd else hvd.Average),
        "Mismatched reduction operation: ",
    ),
]
MIXED = (torch.float32, torch.int64)


def _assert_works() -> None:
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


@on_hvd_workers(2)
def test_wrong_arguments_raise_at_once_and_horovod_goes_on() -> None:
    for what, call, error, text in AT_ONCE:
        with pytest.raises(error, match=text or None) as caught:
            call()
        assert type(caught.value) is error, what
        _assert_works()


@on_hvd_workers(2, 3, is_last=[True, False])
def test_disagreements_raise_on_every_rank_and_horovod_goes_on(size: int, is_last: bool) -> None:
    odd_rank = size - 1 if is_last else 0
    for what, call, text in COMPARED:
        for _ in range(2):
            handle = call(int(hvd.rank() == odd_rank))
            with pytest.raises(HorovodInternalError, match=text):
                hvd.synchronize(handle)
            assert hvd.synchronize(handle) is None, what
            _assert_works()


@on_hvd_workers(2)
def test_disagreements_do_not_touch_what_else_is_pending() -> None:
    good = [hvd.allreduce_async(torch.full((2,), float(index)), name=f"good{index}") for index in range(5)]
    bad = [hvd.allreduce_async(torch.ones(2 + hvd.rank()), name=f"bad{index}") for index in range(5)]
    more = [hvd.allgather_async(torch.full((2,), float(index)), name=f"good{index}") for index in range(5)]
    for handle in bad:
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            hvd.synchronize(handle)
    for index in range(5):
        assert hvd.synchronize(good[index]).tolist() == [index] * 2
        assert hvd.synchronize(more[index]).tolist() == [index] * 4


@on_hvd_workers(2)
def test_name_is_taken_until_its_operation_finishes() -> None:
    taken = "Requested to allreduce, allgather, or broadcast a tensor with the same name"
    calls: dict[str, Callable[..., int]] = {
        "allreduce": hvd.allreduce_async,
        "allgather": hvd.allgather_async,
        "broadcast": lambda tensor, name: hvd.broadcast_async(tensor, 0, name=name),
        "alltoall": hvd.alltoall_async,
        "reducescatter": hvd.reducescatter_async,
    }
    if hvd.rank() == 0:
        handles = [call(ONE, name="x") for call in calls.values()]  # of one name, but of five kinds
        for call in calls.values():
            with pytest.raises(ValueError, match=taken):
                call(ONE, name="x")
        assert not any(map(hvd.poll, handles))
        hvd.barrier()
    else:
        hvd.barrier()
        handles = [call(ONE, name="x") for call in calls.values()]
    for handle in handles:
        hvd.synchronize(handle)
    assert hvd.allreduce(ONE, name="x").tolist() == ONE.tolist()


@on_hvd_workers(2)
def test_different_kinds_of_one_name_wait_for_their_like() -> None:
    begin = [lambda: hvd.allreduce_async(ONE, name="x", op=hvd.Sum), lambda: hvd.broadcast_async(ONE, 0, name="x")]
    first = begin[hvd.rank()]()
    _assert_works()
    assert not hvd.poll(first)
    second = begin[1 - hvd.rank()]()
    totals = sorted(hvd.synchronize(handle).sum().item() for handle in (first, second))
    assert totals == [4.0, 8.0]


@on_hvd_workers(2)
def test_handles_are_polled_and_end_once() -> None:
    handle = hvd.allreduce_async(ONE)
    while not hvd.poll(handle):
        pass
    assert hvd.poll(handle)
    assert hvd.synchronize(handle).tolist() == ONE.tolist()
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None
    with pytest.raises(ValueError, match=f"Handle {handle} was not created or has been cleared."):
        hvd.poll(handle)
    _assert_works()


@on_hvd_workers(2)
def test_average_is_deprecated_and_excludes_op() -> None:
    mine = torch.full((2,), 1.0 + hvd.rank())
    for call in (hvd.allreduce, hvd.allreduce_, lambda t, **options: hvd.grouped_allreduce([t], **options)[0]):
        for average, wanted in ((True, 1.5), (False, 3.0)):
            with pytest.warns(DeprecationWarning, match="average"):
                assert call(mine.clone(), average=average).tolist() == [wanted] * 2
        with pytest.warns(DeprecationWarning, match="average"), pytest.raises(ValueError, match="op"):
            call(mine, average=True, op=hvd.Sum)
        _assert_works()


@on_workers(2)
def test_nothing_works_before_init_and_after_shutdown() -> None:
    operations: list[Callable[[], Any]] = [
        *(lambda call=call: call(ONE.clone()) for call in SYNC.values()),
        hvd.barrier,
        hvd.join,
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters([ONE.clone()], 0),
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([ONE.clone()], 0.1), 0),
    ]
    questions = [hvd.size, hvd.rank, hvd.local_size, hvd.local_rank, hvd.cross_size, hvd.cross_rank, hvd.stop_timeline]
    for turn in range(2):
        for operation in operations:
            with pytest.raises(HorovodInternalError, match=NOT_INITIALIZED):
                operation()
        for question in questions:
            with pytest.raises(ValueError, match=NOT_INITIALIZED):
                question()
        if turn == 0:
            hvd.init()
            _assert_works()
            hvd.shutdown()


@on_workers(2)
def test_wrong_arguments_of_init_raise_and_init_works_afterwards(world: World) -> None:
    twice = hvd.ProcessSet([0])
    differing = hvd.ProcessSet([hvd_rank := world.rank])
    wrong: list[dict[str, Any]] = [
        {"process_sets": "static"},
        {"process_sets": [[0]]},
        {"process_sets": [twice, hvd.ProcessSet([0])]},
        {"process_sets": [hvd.ProcessSet([0, 1])]},  # the global set
        {"process_sets": [hvd.ProcessSet([0, 5])]},
        {"process_sets": [differing]},
        {"comm": 5},
        {"comm": [0, 1, 2]},
        {"comm": [1 - hvd_rank]},
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match=r"\w"):
            hvd.init(**arguments)
        assert not hvd.is_initialized()
        assert twice.process_set_id is None
        hvd.init()
        _assert_works()
        hvd.shutdown()
