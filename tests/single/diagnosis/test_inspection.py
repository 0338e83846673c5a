"""A worker's state from outside: programs that publish their progress, and faulthandler's text."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import Job, own_environment, started

from lockstep.diagnosis import FOLDER
from lockstep.diagnosis.board import BoardReader, boards_in
from lockstep.diagnosis.inspection import Frame, inspect_worker, main_stack, without_board

TEXT = """Thread 0x00007f746ffff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f755527eb80 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/nn/functional.py", line 12 in linear
  File "/home/me/my model.py", line 7 in forward
  ...
"""
PROGRAM = """
import ctypes, sys, time
from lockstep.diagnosis import publisher
from lockstep.diagnosis import FOLDER
from lockstep.diagnosis.board import HVD

def stuck():
    while True:
        (ctypes.PyDLL(None).sleep if sys.argv[1] == "gil" else time.sleep)(1000)

publisher.start()
publisher.start()  # changes nothing
publisher.set_source(lambda: ["allreduce.loss"], HVD)
publisher.report("forward", 5)
print("ready", flush=True)
stuck()
"""


def test_the_main_threads_frames_are_found() -> None:
    assert main_stack(TEXT, 0x7F755527EB80) == (
        Frame("/usr/lib/python3.11/site-packages/torch/nn/functional.py", 12, "linear", False),
        Frame("/home/me/my model.py", 7, "forward", True),
    )
    assert main_stack(TEXT, 1) == ()
    newer = TEXT.replace("eb80 (", "eb80 [MainThread] (")
    assert main_stack(newer, 0x7F755527EB80) == main_stack(TEXT, 0x7F755527EB80)
    assert len(main_stack(TEXT + TEXT, 0x7F755527EB80)) == 2


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


def test_a_process_without_a_board_has_a_state_and_no_signal_is_sent() -> None:
    state = without_board(1, os.getpid())
    assert (state.rank, state.pid, state.stack) == (1, os.getpid(), ())
    assert state.state in "RS"
