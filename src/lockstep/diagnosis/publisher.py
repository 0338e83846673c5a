"""A worker's side of the diagnosis: its board, and on request its stack and its unfinished collectives.

A thread answers. If it cannot, because native code holds the GIL, faulthandler writes the stacks on a signal. That is
the exception: a signal interrupts system calls of libraries that may not be prepared for it.

Started by `lockstep.world.connect`, by `hvd.init()` and, for any other program, by `import torch` (the entry point
`torch.backends` of this package), if the variable LOCKSTEP_PROGRESS names the folder of its node process. Without
that, every function here does nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType

from lockstep.diagnosis import flight_recorder
from lockstep.diagnosis.board import TORCH_GROUP, Board, Phase

FOLDER = "LOCKSTEP_PROGRESS"
STACKS, ANSWER = ".stacks", ".answer"  # suffixes of files beside the board
MOST_FRAMES = 100
INTERVAL_SECONDS = 0.5  # in which a question is answered, unless the GIL is held
STACK_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None

_board: Board | None = None
_owner = 0  # the process that started: a forked child is not this worker
_source: Callable[[], list[str]] = list


def start() -> None:
    """Publish this worker's progress from now on, if its launcher wants it; call it as often as you like."""
    global _board, _owner, _source
    folder, rank = os.environ.get(FOLDER, ""), os.environ.get("RANK", "")
    if not folder or not rank.isdecimal() or STACK_SIGNAL is None or _owner == os.getpid():
        return
    _owner = os.getpid()
    _source = list
    try:
        _board = Board(Path(folder), int(rank), threading.main_thread().ident or 0)
        stacks = _board.path.with_suffix(STACKS).open("ab", buffering=0)
    except OSError:  # the launcher has exited, or this worker is on another host
        _board = None
        return
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
    threading.Thread(target=_serve, args=(_board,), name="lockstep-diagnosis", daemon=True).start()


def own_board() -> Board | None:
    """Return this worker's board; None if it publishes nothing."""
    return _board if _owner == os.getpid() else None


def report(phase: Phase, step: int | None = None) -> None:
    """Publish that this worker enters a phase of its work."""
    if board := own_board():
        board.report(phase, step)


def touch() -> None:
    """Publish that this worker has made progress."""
    if board := own_board():
        board.touch()


def set_source(pending: Callable[[], list[str]], flag: int) -> None:
    """Publish operations besides torch's: `pending`, called in another thread, names those that are not finished."""
    global _source
    if board := own_board():
        _source = pending
        board.add_flag(flag)


def _serve(board: Board) -> None:
    """Publish the numbers of torch's collectives twice a second, and answer questions."""
    answered, has_group = 0, False
    ended = threading.Event()
    while not ended.wait(INTERVAL_SECONDS):
        if os.getpid() != _owner:
            return
        if numbers := flight_recorder.counts():
            board.set_collectives(*numbers)
            if not has_group:
                has_group = True
                board.add_flag(TORCH_GROUP)
        if board.question != answered:
            answered = board.question
            with suppress(OSError):  # the folder was removed: the job is ending
                _answer(board)
            board.answered(answered)


def _answer(board: Board) -> None:
    path, scratch = board.path.with_suffix(ANSWER), board.path.with_suffix(f"{ANSWER}-new")
    pending, stack = _source(), sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [(code.co_filename, line, code.co_name) for code, line in _walk(stack)]
    collectives = [asdict(each) for each in flight_recorder.latest()]
    scratch.write_text(json.dumps({"operations": pending, "collectives": collectives, "stack": frames}))
    scratch.replace(path)


def _walk(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """Yield the code and line of each frame, innermost first."""
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back
