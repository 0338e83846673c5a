"""Workers notice peers that exit, fail or stay away from a new group."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from commands import TORCHRUN, own_environment, run
from time_limits import scaled
from worker_group import on_workers, run_in_workers

from lockstep.diagnosis.idle_clock import hang_limit
from lockstep.errors import ConfigError, HangError, LostPeerError, is_lost_peer
from lockstep.world import peer_loss
from lockstep.world.peer_loss import LossWatch, defer_exit
from lockstep.world.world import World


def _wait_for_ever(world: World, folder: Path, writes_seconds: float) -> None:
    """The last worker ends; the others' main threads wait where no error reaches them."""
    peer_loss.PATIENCE_SECONDS = 0.2

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
        run_in_workers(3, _wait_for_ever, tmp_path, 1.0)
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
    time.sleep(0.5)


def _end_for_a_reason_of_its_own(world: World) -> str:
    peer_loss.PATIENCE_SECONDS = 0.1
    watch = LossWatch(world.rank_info, dist.distributed_c10d._get_default_store(), 30.0)
    watch.disarm()
    world.barrier()
    if world.rank == 1:
        os._exit(9)
    time.sleep(0.5)
    raise ZeroDivisionError


def test_worker_with_its_own_error_is_not_interrupted() -> None:
    with pytest.raises(AssertionError, match=r"worker 0:\nTraceback[^$]*ZeroDivisionError"):
        run_in_workers(2, _end_for_a_reason_of_its_own)


def test_it_counts_as_what_follows_from_another_error() -> None:
    assert is_lost_peer(LostPeerError("worker 1 was lost"))
    for words in ("NCCL communicator was aborted on rank 1.", "remote process exiting", "remote process exited"):
        assert is_lost_peer(RuntimeError(words))


SUPPORT = Path(__file__).parents[1] / "support"
TRAIN = ["--data", "hanging:data", "--model", "hanging:net", "-b", "4", "--epochs", "2", "-j", "1", "--device", "cpu"]
DOING = {
    "stop": "rank 1 is not responding: its process is stopped or frozen",
    "data": "rank 1 is waiting for data",
    "sleep": "rank 1 is in forward, at hanging.py:",
}


@pytest.mark.parametrize("kind", ["sleep", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("data", "stop"))])
def test_under_torchrun_the_workers_explain_a_hang_and_end(tmp_path: Path, kind: str) -> None:
    environment = own_environment(PYTHONPATH=str(SUPPORT), HANGING=f"{kind} 1", OMP_NUM_THREADS="1")
    command = [
        *TORCHRUN,
        "-m",
        "lockstep",
        "train",
        *TRAIN,
        "--run-dir",
        "run",
        "--lr",
        "0.01",
        "--hang-timeout",
        f"{scaled(3)}",
    ]
    done = run(command, tmp_path, environment)
    text = done.stdout + done.stderr
    assert done.returncode, text
    assert "lockstep: rank 1 " in text
    assert "has not entered " in text
    assert DOING[kind] in text
    assert f"exitcode  : {HangError.exit_code} " in text


CALM = """
import os, time
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

with connect(RankInfo.from_environment(), "cpu") as world:
    end = time.monotonic() + 1.5 * float(os.environ["LOCKSTEP_HANG_TIMEOUT"])
    while world.rank == 0 and time.monotonic() < end:
        with open("file", "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(0.2)
    world.barrier()
print(f"rank {world.rank} is done")
"""


def test_slow_work_of_one_rank_is_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "calm.py").write_text(CALM)
    done = run(
        [*TORCHRUN, "calm.py"], tmp_path, own_environment(OMP_NUM_THREADS="1", LOCKSTEP_HANG_TIMEOUT=f"{scaled(3)}")
    )
    assert (done.returncode, done.stdout.count("is done")) == (0, 2), done.stderr
    assert "has not entered" not in done.stderr


def test_the_limit_is_a_number_of_seconds() -> None:
    assert hang_limit({}) == 300
    assert hang_limit({"LOCKSTEP_HANG_TIMEOUT": "12.5"}) == 12.5
    assert hang_limit({"LOCKSTEP_HANG_TIMEOUT": "0"}) == 0
    with pytest.raises(ConfigError, match="LOCKSTEP_HANG_TIMEOUT 'soon': must be 0 or more seconds"):
        hang_limit({"LOCKSTEP_HANG_TIMEOUT": "soon"})
