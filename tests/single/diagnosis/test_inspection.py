"""A worker's state from outside: programs that publish their progress, and faulthandler's text."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Job, own_environment, started

from lockstep.diagnosis import FOLDER
from lockstep.diagnosis.board import ANSWER_SUFFIX, HVD, Board, BoardReader, boards_in
from lockstep.diagnosis.board import ANSWERS as HAS_THREAD
from lockstep.diagnosis.inspection import Frame, glance, inspect_worker, last_stack, without_board

TEXT = """Stack (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 12 in linear
  File "/home/me/my model.py", line 7 in forward
  ...
"""
PROGRAM = """
import ctypes, sys, threading, time
from lockstep.diagnosis import publisher
from lockstep.diagnosis import FOLDER

def stuck():
    while True:
        (time.sleep if sys.argv[1] == "sleep" else ctypes.PyDLL(None).sleep)(1000)

publisher.start()
publisher.start()  # changes nothing
publisher.set_source(lambda: ["allreduce.loss"])
publisher.report("forward", 5)
print("ready", flush=True)
if sys.argv[1] == "gil beside threads":
    for _ in range(120):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
stuck()
"""


def test_the_frames_of_the_last_stack_are_found() -> None:
    assert last_stack(TEXT) == (
        Frame("/usr/lib/python3.11/site-packages/torch/nn/functional.py", 12, "linear", False),
        Frame("/home/me/my model.py", 7, "forward", True),
    )
    assert last_stack("") == ()
    assert last_stack(TEXT.replace("Stack (", "Current thread 0x00007f755527eb80 [main] (")) == last_stack(TEXT)
    assert len(last_stack(TEXT + TEXT)) == 2


@contextmanager
def program(folder: Path, how: str) -> Iterator[tuple[Job, BoardReader]]:
    (folder / "program.py").write_text(PROGRAM)
    environment = own_environment(RANK="2", **{FOLDER: str(folder)})
    with started([sys.executable, "program.py", how], folder, environment) as job:
        job.wait_for("ready")
        (board,) = boards_in(folder)
        yield job, board


def test_a_worker_answers_with_its_stack_and_its_operations(tmp_path: Path) -> None:
    with program(tmp_path, "sleep") as (job, board):
        state = job.wait_until(lambda: (found := inspect_worker(board)).has_answered and found)
        assert (state.rank, state.pid, state.phase, state.step) == (2, job.pid, "forward", 5)
        assert state.operations == ("allreduce.loss",)
        assert state.stack[0].function == "stuck"
        assert state.stack[0].is_users
        job.send_signal(signal.SIGSTOP)
        job.wait_until(lambda: inspect_worker(board).state == "T")
        assert not inspect_worker(board).stack
        job.send_signal(signal.SIGCONT)
    assert inspect_worker(board).state in ("", "Z")


def test_a_stack_is_found_even_if_native_code_holds_the_gil(tmp_path: Path) -> None:
    with program(tmp_path, "gil") as (job, board):
        state = job.wait_until(lambda: (found := inspect_worker(board)).stack and found)
    assert not state.has_answered
    assert state.stack[0].function == "stuck"


def test_main_threads_stack_is_found_beyond_faulthandlers_limit(tmp_path: Path) -> None:
    with program(tmp_path, "gil beside threads") as (job, board):  # which starts its threads after it is ready
        job.wait_until(lambda: (stack := inspect_worker(board).stack) and stack[0].function == "stuck")


ANSWERS = ["", "[]", "{", '{"stack": [["a", 1]]}', '{"collectives": [{"group": "0"}]}', '{"operations": 3}']


@pytest.mark.parametrize("text", ANSWERS)
def test_a_malformed_answer_is_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    board = Board(tmp_path, 0)
    board.set_flag(HVD | HAS_THREAD)
    board.report("forward", 3)
    board.answered(9)
    board.path.with_suffix(ANSWER_SUFFIX).write_text(text)
    state = inspect_worker(BoardReader(board.path))
    assert (state.stack, state.operations, state.collectives) == ((), (), ())
    assert (state.has_answered, state.phase, state.step) == (True, "forward", 3)


def test_a_glance_shows_what_the_board_does_and_asks_nothing(tmp_path: Path) -> None:
    board = Board(tmp_path, 4)
    board.report("backward", 7)
    board.set_sample(9, 7)
    state = glance(BoardReader(board.path).read())
    assert (state.rank, state.pid, state.phase, state.step, state.pending) == (4, os.getpid(), "backward", 7, 2)
    assert board.question == 0


def test_a_worker_that_removed_its_board_is_seen_from_outside(tmp_path: Path) -> None:
    board = Board(tmp_path, 4)
    board.report("backward", 7)
    reader = BoardReader(board.path)
    reader.read()
    board.path.unlink()
    assert inspect_worker(reader).step == 7


def test_process_without_a_board_gets_no_signal() -> None:
    state = without_board(1, os.getpid())
    assert (state.rank, state.pid, state.stack) == (1, os.getpid(), ())
    assert state.state in "RS"
