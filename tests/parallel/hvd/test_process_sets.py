"""Process sets: registered at init or later, used at the same time, by members only, and removed."""

from __future__ import annotations

import pytest
import torch
from worker_group import on_workers

from lockstep import hvd
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.world.world import World


def total(process_set: hvd.ProcessSet = hvd.global_process_set, name: str | None = None) -> float:
    return float(hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum, process_set=process_set, name=name))


@on_workers(4)
def test_static_sets_are_registered_by_init() -> None:
    even, odd, one = hvd.ProcessSet([2, 0]), hvd.ProcessSet(range(1, 4, 2)), hvd.ProcessSet([1])
    assert (even.process_set_id, even.size(), even.rank(), even.included()) == (None, None, None, None)
    for _ in range(2):
        hvd.init(process_sets=[even, odd, one])
        assert [hvd.global_process_set.process_set_id, hvd.global_process_set.ranks] == [0, [0, 1, 2, 3]]
        assert [even.process_set_id, odd.process_set_id, one.process_set_id] == [1, 2, 3]
        assert [even.ranks, odd.ranks, one.ranks] == [[0, 2], [1, 3], [1]]
        mine, other = (odd, even) if hvd.rank() % 2 else (even, odd)
        assert (mine.size(), mine.rank(), mine.included()) == (2, hvd.rank() // 2, True)
        assert (other.size(), other.included()) == (2, False)
        with pytest.raises(ValueError, match=r"not a member"):
            other.rank()
        assert total(mine) == (4 if hvd.rank() % 2 else 2)
        if one.included():
            assert total(one) == 1
        with pytest.raises(ValueError, match="DYNAMIC"):
            hvd.add_process_set([0, 1])
        assert total() == 6
        hvd.shutdown()
        assert even.process_set_id is None


@on_workers(4)
def test_every_collective_works_within_a_set() -> None:
    pair = hvd.ProcessSet([1, 3])
    hvd.init(process_sets=[pair])
    rank = hvd.rank()
    mine = torch.full((2,), float(rank))
    if pair.included():
        assert hvd.allreduce(mine, process_set=pair).tolist() == [2.0, 2.0]
        assert hvd.grouped_allreduce([mine], process_set=pair)[0].tolist() == [2.0, 2.0]
        assert hvd.allgather(mine, process_set=pair).tolist() == [1.0, 1.0, 3.0, 3.0]
        assert hvd.broadcast(mine, 3, process_set=pair).tolist() == [3.0, 3.0], "by its global rank"
        assert hvd.alltoall(mine, process_set=pair).tolist() == [1.0, 3.0]
        assert hvd.reducescatter(mine, op=hvd.Sum, process_set=pair).tolist() == [4.0]
        assert hvd.broadcast_object(rank, 3, process_set=pair) == 3
        sparse = torch.sparse_coo_tensor([[rank]], [2.0], (4,), check_invariants=True)
        average = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average, process_set=pair)()
        assert average.to_dense().tolist() == [0.0, 1.0, 0.0, 1.0]
        hvd.barrier(process_set=pair)
        with pytest.raises(ValueError, match="broadcast received invalid root rank 0 for provided process set"):
            hvd.broadcast(mine, 0, process_set=pair)
    else:
        calls = {
            "Allreduce": lambda: hvd.allreduce(mine, process_set=pair),
            "Allgather": lambda: hvd.allgather(mine, process_set=pair),
            "Broadcast": lambda: hvd.broadcast(mine, 1, process_set=pair),
            "Alltoall": lambda: hvd.alltoall(mine, process_set=pair),
            "Reducescatter": lambda: hvd.reducescatter(mine, process_set=pair),
            "Barrier": lambda: hvd.barrier(process_set=pair),
        }
        for kind, call in calls.items():
            with pytest.raises(ValueError, match=f"{kind}: Rank {rank} is not a member of the provided process set"):
                call()
    assert total() == 6
    hvd.shutdown()


@on_workers(4)
def test_overlapping_sets_work_concurrently_under_the_same_names() -> None:
    sets = [hvd.ProcessSet(ranks) for ranks in ([0, 1, 2], [1, 2, 3], [0, 3], [2])]
    hvd.init(process_sets=sets)
    mine = [one for one in [hvd.global_process_set, *sets] if one.included()]
    order = mine if hvd.rank() % 2 else mine[::-1]
    handles = {}
    for turn in range(30):
        for one in order:
            tensor = torch.full((2 + 40 * turn,), float(hvd.rank() + turn))
            handle = hvd.allreduce_async(tensor, name=f"t{turn}", op=hvd.Sum, process_set=one)
            handles[turn, one.process_set_id] = handle
    for turn in reversed(range(30)):
        for one in mine:
            result = hvd.synchronize(handles[turn, one.process_set_id])
            assert result.tolist() == [float(sum(one.ranks) + turn * len(one.ranks))] * (2 + 40 * turn)
    hvd.shutdown()


@on_workers(4, by=["init", "environment"])
def test_dynamic_sets_come_and_go(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    hvd.init(process_sets="dynamic" if by == "init" else None)
    for _ in range(3):
        first = hvd.add_process_set([3, 1])
        second = hvd.add_process_set(hvd.ProcessSet([1, 2, 3]))
        assert isinstance(first, hvd.ProcessSet)
        assert (first.ranks, second.ranks) == ([1, 3], [1, 2, 3])
        assert first.process_set_id != second.process_set_id
        if hvd.rank() > 0:
            assert total(second) == 6
        if first.included():
            assert total(first) == 4
        for duplicate in ([1, 3], [0, 1, 2, 3], first):
            with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
                hvd.add_process_set(duplicate)
        assert hvd.remove_process_set(first) is True
        assert first.process_set_id is None
        assert hvd.remove_process_set(first) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
        with pytest.raises(TypeError, match="not registered"):
            hvd.allreduce(torch.ones(1), process_set=first)
        if hvd.rank() > 0:
            assert total(second) == 6
        assert hvd.remove_process_set(second) is True
        assert total() == 6
    hvd.shutdown()


@on_workers(4)
def test_wrong_sets_raise_and_leave_the_rest_working() -> None:
    for ranks in ([0.5], ["0"], [True], 3, None):
        with pytest.raises(ValueError, match="ProcessSet"):
            hvd.ProcessSet(ranks)
    hvd.init(process_sets="dynamic")
    for ranks in ([5], [-1, 0], [], [0, 4]):
        with pytest.raises(ValueError, match=r"from 0 to 3"):
            hvd.add_process_set(ranks)
        assert total() == 6
    for _ in range(2):
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            hvd.add_process_set([0, 1] if hvd.rank() < 2 else [2, 3])
        assert total() == 6
    left, right = hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])
    assert total(left if left.included() else right) == (1 if left.included() else 5)
    with pytest.raises(HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
        hvd.allreduce(torch.ones(1 + hvd.rank()), process_set=left if left.included() else right)
    assert total(left if left.included() else right) == (1 if left.included() else 5)
    hvd.shutdown()


@on_workers(3)
def test_a_removed_set_fails_what_is_pending_in_it() -> None:
    hvd.init(process_sets="dynamic")
    pair = hvd.add_process_set([0, 1])
    handle = hvd.allreduce_async(torch.ones(1), name="alone", process_set=pair) if hvd.rank() == 0 else None
    assert total() == 3
    assert hvd.remove_process_set(pair)
    if handle is not None:
        with pytest.raises(HorovodInternalError, match="removed"):
            hvd.synchronize(handle)
    again = hvd.add_process_set([0, 1])
    if again.included():
        assert total(again) == 1
    assert total() == 3
    hvd.shutdown()


@on_workers(3)
def test_some_ranks_may_form_the_whole_world(world: World) -> None:
    if world.rank == 1:
        with pytest.raises(ValueError, match="comm"):
            hvd.init(comm=[0, 2])
        facts = [-1, -1]
    else:
        hvd.init(comm=[0, 2])
        facts = [hvd.rank(), int(hvd.allreduce(torch.tensor([world.rank]), op=hvd.Sum))]
        hvd.shutdown()
    hvd.init()
    assert total() == 3
    hvd.shutdown()
    assert facts == [[0, 2], [-1, -1], [1, 2]][world.rank]
