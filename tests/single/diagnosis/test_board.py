"""What workers publish of themselves, and what the system knows of a process."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from commands import own_environment, run

from lockstep.diagnosis.board import ANSWERS, HVD, NO_STEP, TRAINER, Board, BoardReader, boards_in
from lockstep.diagnosis.board import SIZE_BYTES as BOARD_BYTES
from lockstep.diagnosis.idle_clock import activity


def test_what_a_worker_reports_is_read(tmp_path: Path) -> None:
    board = Board(tmp_path, 3)
    reader = BoardReader(board.path)
    first = reader.read()
    assert (first.pid, first.rank) == (os.getpid(), 3)
    assert (first.count, first.step, first.phase) == (0, NO_STEP, "starting")
    board.report("forward", 12)
    board.report("backward")
    board.set_sample(9, 8, 77)
    seen = reader.read()
    assert (seen.count, seen.step, seen.phase) == (2, 12, "backward")
    assert (seen.enqueued, seen.completed, seen.fingerprint) == (9, 8, 77)


def test_worker_is_judged_while_something_that_can_hang_reports(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    reader = BoardReader(board.path)
    board.set_flag(ANSWERS)
    assert not reader.read().is_judged
    board.set_flag(HVD)
    board.set_flag(TRAINER)
    assert reader.read().is_judged
    board.set_flag(TRAINER, False)
    assert reader.read().flags == HVD | ANSWERS


def test_a_question_is_answered_by_its_number(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    reader = BoardReader(board.path)
    assert reader.ask() == 1
    assert reader.ask() == 2
    assert board.question == 2
    assert reader.read().answer == 0
    board.answered(2)
    assert reader.read().answer == 2


def test_a_folders_boards_are_those_that_can_be_read_by_rank(tmp_path: Path) -> None:
    for rank in (2, 0):
        Board(tmp_path, rank)
    (tmp_path / "1-77.board").write_bytes(b"")
    (tmp_path / "1-78.board").write_bytes(bytes(4000))
    (tmp_path / "1-79.answer").write_text("{}")
    assert [board.rank for board in boards_in(tmp_path)] == [0, 2]


def test_truncated_or_removed_board_shows_its_last_content(tmp_path: Path) -> None:
    board = Board(tmp_path, 0)
    board.report("forward", 12)
    reader, own = BoardReader(board.path), board.reader()
    assert reader.read().step == 12
    os.truncate(board.path, 0)
    assert reader.read().step == 12
    assert not boards_in(tmp_path)
    os.truncate(board.path, 128)  # else this process would end at its next report, as the worker would
    board.path.unlink()
    assert reader.read().step == 12
    board.report("backward", 13)
    assert own.read().step == 13


def test_a_board_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0-1.board").write_bytes(bytes(BOARD_BYTES))
    with pytest.raises(ValueError, match="not a board of this version"):
        BoardReader(tmp_path / "0-1.board")


SHOW = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('lockstep')))"
GROUP = """
import threading, torch, torch.distributed as dist

def names():
    return [thread.name for thread in threading.enumerate()]

print(names())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(names())
"""


def test_torch_finds_the_entry_point() -> None:
    (found,) = entry_points(group="torch.backends", name="lockstep")
    assert found.value == "lockstep.world.autoload:attach"


@pytest.mark.cold
def test_worker_publishes_from_its_first_group_and_others_never(tmp_path: Path) -> None:
    environment = own_environment(RANK="3", LOCKSTEP_PROGRESS=str(tmp_path))
    programs = [([sys.executable, "-c", SHOW], own_environment()), ([sys.executable, "-c", GROUP], environment)]
    other, worker = (run(command, tmp_path, own, cold=True) for command, own in programs)
    modules = ["lockstep", "lockstep.diagnosis", "lockstep.world", "lockstep.world.autoload"]
    assert other.stdout == f"{modules}\n", other.stderr
    assert worker.stdout == "['MainThread']\n['MainThread', 'lockstep-diagnosis']\n", worker.stderr
    (board,) = boards_in(tmp_path)
    assert board.rank == 3
    assert board.read().is_judged


SIZE_BYTES = 50_000


def _carry() -> None:
    """Write to a pipe and read it, which is neither storage nor in the page cache."""
    reader, writer = os.pipe()
    os.write(writer, bytes(SIZE_BYTES))
    os.read(reader, SIZE_BYTES)
    os.close(reader)
    os.close(writer)


def test_bytes_that_the_main_thread_reads_and_writes_count() -> None:
    before = activity(os.getpid(), descendants=False)
    _carry()
    assert activity(os.getpid(), descendants=False).bytes - before.bytes >= 2 * SIZE_BYTES


def test_bytes_of_pipes_in_another_thread_do_not_count() -> None:
    before = activity(os.getpid(), descendants=False)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_carry).result()
    assert activity(os.getpid(), descendants=False).bytes - before.bytes < SIZE_BYTES
