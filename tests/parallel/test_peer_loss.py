"""A worker that waits in its device for one that is lost ends, and says why; no launcher helps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from worker_group import run_in_workers

from lockstep.errors import LostPeerError, StoppedError, is_lost_peer
from lockstep.world import accelerator, peer_loss
from lockstep.world import world as worlds
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.peer_loss import LossWatch, unbroken
from lockstep.world.store import serve_store
from lockstep.world.world import World, connect


def _wait_for_ever(world: World, folder: Path, writes_seconds: float) -> None:
    """The last worker ends; the others' main threads wait where no error reaches them."""
    peer_loss.PATIENCE_SECONDS = 0.5

    def tell(error: LostPeerError) -> int:
        (folder / f"told by {world.rank}").write_text(str(error))
        return 1

    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0, tell)
    begun = threading.Event()

    def write() -> None:
        with unbroken():
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


def _come_to_a_good_end(world: World) -> str:
    peer_loss.PATIENCE_SECONDS = 0.1
    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0)
    world.barrier()
    time.sleep(0.3 * world.rank)
    watch.close()
    time.sleep(1)
    return "here"


def test_good_ends_are_told_apart() -> None:
    assert run_in_workers(3, _come_to_a_good_end) == ["here"] * 3


def _end_for_a_reason_of_its_own(world: World) -> str:
    peer_loss.PATIENCE_SECONDS = 0.1
    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0)
    watch.stand_down()
    world.barrier()
    if world.rank == 1:
        os._exit(9)
    time.sleep(1)
    raise ZeroDivisionError


def test_who_ends_for_a_reason_of_its_own_is_left_to_it() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:\nTraceback[^$]*ZeroDivisionError"):
        run_in_workers(2, _end_for_a_reason_of_its_own)


def test_it_counts_as_what_follows_from_another_error() -> None:
    assert is_lost_peer(LostPeerError("worker 1 was lost"))
    for words in ("NCCL communicator was aborted on rank 1.", "remote process exiting", "remote process exited"):
        assert is_lost_peer(RuntimeError(words))


class Watch:
    """Stands for a LossWatch or a GroupWatch: what became of it."""

    def __init__(self, *_: Any) -> None:
        self.closed = self.stands_down = False

    def stand_down(self) -> None:
        self.stands_down = True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("error", "aborted"), [(None, False), (ZeroDivisionError, True), (StoppedError, False)])
def test_groups_of_devices_are_watched_and_aborted_by_an_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, aborted: bool
) -> None:
    """With a group that carries nothing, and a device that there is not."""
    happened: list[str] = []
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    monkeypatch.setattr(accelerator, "use", lambda device: None)
    monkeypatch.setattr(accelerator, "backend", lambda kind: "fake")
    monkeypatch.setattr(worlds, "check_devices", lambda *_: None)
    monkeypatch.setattr(worlds, "open_store", lambda *_: serve_store()[0])
    monkeypatch.setattr(worlds, "LossWatch", Watch)
    monkeypatch.setattr(worlds, "GroupWatch", Watch)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: happened.append("abort"))
    start_group = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda **given: start_group(**{**given, "backend": "fake", "device_id": None})
    )
    try:
        with connect(RankInfo(0, 2, 0, 2, 0, "Slurm")) as ours:
            assert ours.device == torch.device("cuda", 0)
            watches: list[Any] = list(worlds._watches)
            assert len(watches) == 2
            if error:
                raise error("words")
        assert all(watch.closed for watch in watches)
        assert not worlds._watches
    except (ZeroDivisionError, StoppedError):
        assert all(watch.stands_down for watch in watches)
        assert not any(watch.closed for watch in watches)
        worlds.disconnect()
        assert all(watch.closed for watch in watches)
    assert happened == ["abort"] * aborted
