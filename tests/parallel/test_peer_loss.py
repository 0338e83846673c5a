"""A worker that waits in its device for one that is lost ends, and says why; no launcher helps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from worker_group import on_workers, run_in_workers

from lockstep.errors import LostPeerError, is_lost_peer
from lockstep.world import peer_loss
from lockstep.world.peer_loss import LossWatch, defer_exit
from lockstep.world.world import World


def _wait_for_ever(world: World, folder: Path, writes_seconds: float) -> None:
    """The last worker ends; the others' main threads wait where no error reaches them."""
    peer_loss.PATIENCE_SECONDS = 0.5

    def tell(error: LostPeerError) -> int:
        (folder / f"told by {world.rank}").write_text(str(error))
        return 1

    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0, tell)
    begun = threading.Event()

    def write() -> None:
        with defer_exit():
            begun.set()
            time.sleep(writes_seconds)
            (folder / f"written by {world.rank}").touch()

    threading.Thread(target=write, daemon=True).start()
    begun.wait()
    world.barrier()
    if world.rank == world.size - 1:
        os._exit(9)
    time.sleep(100)  # and then answer
    watch.close()


def test_all_others_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="worker 0:\nended without an answer\nworker 1:\nended without an answer"):
        run_in_workers(3, _wait_for_ever, tmp_path, 2.0)
    for rank in range(2):
        assert "worker 2 disconnected" in (tmp_path / f"told by {rank}").read_text()
        assert (tmp_path / f"written by {rank}").exists()


@on_workers(3)
def test_orderly_exits_are_distinguished(world: World) -> None:
    peer_loss.PATIENCE_SECONDS = 0.1
    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0)
    world.barrier()
    time.sleep(0.3 * world.rank)
    watch.close()
    time.sleep(1)


def _end_for_a_reason_of_its_own(world: World) -> str:
    peer_loss.PATIENCE_SECONDS = 0.1
    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0)
    watch.disarm()
    world.barrier()
    if world.rank == 1:
        os._exit(9)
    time.sleep(1)
    raise ZeroDivisionError


def test_worker_with_its_own_error_is_not_interrupted() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:\nTraceback[^$]*ZeroDivisionError"):
        run_in_workers(2, _end_for_a_reason_of_its_own)


def test_it_counts_as_what_follows_from_another_error() -> None:
    assert is_lost_peer(LostPeerError("worker 1 was lost"))
    for words in ("NCCL communicator was aborted on rank 1.", "remote process exiting", "remote process exited"):
        assert is_lost_peer(RuntimeError(words))
