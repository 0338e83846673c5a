"""One worker by itself: every name works without a peer, a thread or a port; and says so where it cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep import hvd
from lockstep.hvd.basics import is_homogeneous
from lockstep.hvd.engine.context import Context
from lockstep.hvd.engine.settings import Settings
from lockstep.world.launcher_environment import RankInfo

ONE, TWO = torch.ones(3), [torch.ones(3), torch.arange(4)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "TORCHELASTIC_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    yield
    hvd.shutdown()


def test_the_place_of_a_lone_worker() -> None:
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.is_initialized()
    assert [hvd.size(), hvd.local_size(), hvd.cross_size()] == [1, 1, 1]
    assert [hvd.rank(), hvd.local_rank(), hvd.cross_rank()] == [0, 0, 0]
    assert is_homogeneous()
    hvd.init()
    assert hvd.size() == 1


ROWS = torch.tensor([2], dtype=torch.int32)
OPERATIONS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: hvd.allreduce(ONE), ONE),
    "allreduce scaled": (lambda: hvd.allreduce(ONE, prescale_factor=2, postscale_factor=3), 6 * ONE),
    "allreduce_": (lambda: hvd.allreduce_(ONE.clone(), op=hvd.Product), ONE),
    "allreduce_async": (lambda: hvd.synchronize(hvd.allreduce_async(ONE)), ONE),
    "allreduce_async_": (lambda: hvd.synchronize(hvd.allreduce_async_(ONE.clone())), ONE),
    "allreduce by Adasum": (lambda: hvd.allreduce(ONE, op=hvd.Adasum), ONE),
    "grouped_allreduce": (lambda: hvd.grouped_allreduce(TWO), TWO),
    "grouped_allreduce_": (lambda: hvd.grouped_allreduce_([ONE.clone()]), (ONE,)),
    "grouped_allreduce_async": (lambda: hvd.synchronize(hvd.grouped_allreduce_async(TWO)), tuple(TWO)),
    "grouped_allreduce_async_": (lambda: hvd.synchronize(hvd.grouped_allreduce_async_(TWO)), tuple(TWO)),
    "sparse_allreduce_async": (lambda: hvd.sparse_allreduce_async(ONE.to_sparse(), "s", hvd.Sum)().to_dense(), ONE),
    "allgather": (lambda: hvd.allgather(ONE), ONE),
    "allgather_async": (lambda: hvd.synchronize(hvd.allgather_async(ONE)), ONE),
    "grouped_allgather": (lambda: hvd.grouped_allgather(TWO), tuple(TWO)),
    "grouped_allgather_async": (lambda: hvd.synchronize(hvd.grouped_allgather_async(TWO)), tuple(TWO)),
    "broadcast": (lambda: hvd.broadcast(ONE, 0), ONE),
    "broadcast_": (lambda: hvd.broadcast_(ONE.clone(), 0), ONE),
    "broadcast_async": (lambda: hvd.synchronize(hvd.broadcast_async(ONE, 0)), ONE),
    "broadcast_async_": (lambda: hvd.synchronize(hvd.broadcast_async_(ONE.clone(), 0)), ONE),
    "alltoall": (lambda: hvd.alltoall(ONE), ONE),
    "alltoall with splits": (lambda: hvd.alltoall(ONE, ROWS), (ONE[:2], ROWS)),
    "alltoall_async": (lambda: hvd.synchronize(hvd.alltoall_async(ONE, ROWS)), (ONE[:2], ROWS)),
    "reducescatter": (lambda: hvd.reducescatter(ONE), ONE),
    "reducescatter_async": (lambda: hvd.synchronize(hvd.reducescatter_async(ONE, op=hvd.Sum)), ONE),
    "grouped_reducescatter": (lambda: hvd.grouped_reducescatter(TWO), TWO),
    "grouped_reducescatter_async": (lambda: hvd.synchronize(hvd.grouped_reducescatter_async(TWO)), tuple(TWO)),
    "join": (hvd.join, 0),
    "barrier": (hvd.barrier, None),
    "broadcast_object": (lambda: hvd.broadcast_object({"a": 1}), {"a": 1}),
    "allgather_object": (lambda: hvd.allgather_object({"a": 1}), [{"a": 1}]),
    "broadcast_parameters": (lambda: hvd.broadcast_parameters({"a": ONE.clone()}, 0), None),
    "broadcast_optimizer_state": (lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([ONE.clone()], 1), 0), None),
    "stop_timeline": (hvd.stop_timeline, None),
}


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, (list, tuple)):
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype
        assert got.equal(wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gives_back_what_it_got(name: str) -> None:
    call, wanted = OPERATIONS[name]
    hvd.init()
    for _ in range(2):
        assert_same(call(), wanted)
    hvd.shutdown()
    with pytest.raises((hvd.HorovodInternalError, ValueError), match="Horovod has not been initialized"):
        call()


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall, hvd.broadcast])
def test_gradients_pass_through_a_lone_worker(call: Callable[..., Any]) -> None:
    hvd.init()
    mine = torch.ones(3, requires_grad=True)
    result = call(mine, 0) if call is hvd.broadcast else call(mine)
    assert result.data_ptr() != mine.data_ptr()
    (result * 2).sum().backward()
    assert mine.grad is not None
    assert mine.grad.tolist() == [2.0] * 3


def test_a_lone_worker_starts_no_thread_and_opens_no_port() -> None:
    process = psutil.Process()
    threads, files, ports = threading.enumerate(), process.num_fds(), process.net_connections()
    hvd.init()
    for call, _ in OPERATIONS.values():
        call()
    assert {*threading.enumerate()} <= {*threads}  # those of earlier tests may end
    assert process.num_fds() <= files
    assert {*process.net_connections()} <= {*ports}


def test_an_error_leaves_a_lone_worker_working() -> None:
    hvd.init()
    with pytest.raises(ValueError, match="invalid root rank 1"):
        hvd.broadcast(ONE, 1)
    with pytest.raises(ValueError, match="contiguous"):
        hvd.allreduce_(ONE[:1].expand(3), name="x")
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init() or hvd.shutdown() or hvd.init(process_sets=[hvd.ProcessSet([0])])
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.allreduce(ONE, name="x").equal(ONE)


def test_what_is_built_and_enabled() -> None:
    for initialized in (False, True):
        if initialized:
            hvd.init()
        assert hvd.gloo_built() is True
        assert hvd.gloo_enabled() is True
        assert [hvd.mpi_built(), hvd.mpi_enabled(), hvd.ddl_built(), hvd.ccl_built()] == [False] * 4
        assert type(hvd.nccl_built()) is int
        assert hvd.cuda_built() is (torch.version.cuda is not None)
        assert hvd.rocm_built() is (torch.version.hip is not None)
    with pytest.warns(UserWarning, match="mpirun"):
        assert hvd.mpi_threads_supported() is False
    hvd.shutdown()
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.mpi_threads_supported()


def test_last_elastic_worker_keeps_its_slot() -> None:
    def connected(rank_info: RankInfo, launched: int) -> Context:
        context = Context(rank_info, dist.HashStore(), Settings(), launched)
        context.connect()
        context.shut_down()
        return context

    survivor = connected(RankInfo(0, 1, 3, 1, launcher="horovodrun"), launched=1)
    assert (survivor.rank_info.local_rank, survivor.rank_info.local_size) == (3, 1)
    assert survivor.local_ranks == (3,)
    alone = connected(RankInfo(0, 1, 3, 4, launcher="torchrun"), launched=4)
    assert (alone.rank_info.local_rank, alone.rank_info.local_size) == (0, 1)
