"""A worker's side of the diagnosis: its board, and on request its stack and its unfinished collectives.

A thread answers. If it cannot, because native code holds the GIL, faulthandler writes the main thread's stack on a
signal. That is the exception: a signal interrupts system calls of libraries that may not be prepared for it.

`lockstep.world.connect` and `hvd.init()` start this. In any other program the launcher's fork or `import torch` does
(the entry point `torch.backends` of this package), and the thread starts with the first process group. The variable
LOCKSTEP_PROGRESS names the folder of a node process; without it, only `start_in` publishes anything.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lockstep.diagnosis import FOLDER, flight_recorder, of_worker
from lockstep.diagnosis.board import (
    ANSWER_SUFFIX,
    ANSWERS,
    FINISHED,
    GPU_SUFFIX,
    HVD,
    JOINING,
    STACK_SIGNAL,
    STACK_SUFFIX,
    TORCH,
    TORCH_GROUP,
    Board,
)
from lockstep.diagnosis.phases import Phase

MAX_FRAMES = 100
MAX_OPERATIONS = 1000  # the oldest ones
CREATE_GROUP = "_new_process_group_helper"  # which every function that makes a group calls
REMOTE_SECONDS = 2.0  # for the workers of other hosts to finish their last step
INTERVAL_SECONDS = 0.5  # in which a question is answered, unless the GIL is held

_board: Board | None = None
_owner = 0  # the process that started this: a forked child is not this worker
_end_thread: Callable[[], None] | None = None
_source: Callable[[], list[str]] = list


def start(answers: bool = True) -> None:
    """Publish this worker's progress from now on, if its launcher wants it. Further calls change nothing.

    Args:
        answers: Start the thread, too.
    """
    folder, rank = os.environ.get(FOLDER, ""), of_worker("RANK")
    if folder and rank.isdecimal():
        start_in(Path(folder), int(rank), answers)


def attach_to_torch() -> None:
    """Publish the progress of a program that uses torch, and start the thread with its first process group."""
    if multiprocessing.parent_process():  # a loader process, for example
        return
    start(answers=False)
    if _board and _owner == os.getpid():
        before_groups(lambda *_, **__: start())


def before_groups(begin: Callable[..., None]) -> None:
    """Call `begin` before each process group is created, with the arguments of `CREATE_GROUP`, and publish the wait."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    create = getattr(c10d, CREATE_GROUP, None)
    if create is None:
        return

    @functools.wraps(create)
    def create_and_publish(*arguments: Any, **named: Any) -> Any:
        begin(*arguments, **named)
        with joining():
            group = create(*arguments, **named)
        if board := own_board():
            board.set_flag(TORCH_GROUP)  # at once: the worker may hang before the thread's first look
        return group

    setattr(c10d, CREATE_GROUP, create_and_publish)


def start_in(folder: Path, rank: int, answers: bool = True) -> Board | None:
    """Publish this worker's progress in a folder, as `start` does; None if it cannot."""
    if STACK_SIGNAL is not None and _owner != os.getpid():
        _publish(folder, rank, STACK_SIGNAL)
    if _board and "torch" in sys.modules:
        _board.set_flag(TORCH)
    if answers and _board and not _end_thread:
        _serve_in_thread(_board)
    return own_board()


def name_gpu(address: str) -> None:
    """Publish the PCI address of the GPU that this worker uses, "" if unknown, for counting its energy."""
    if board := own_board():
        with suppress(OSError):  # the launcher has exited
            board.path.with_suffix(GPU_SUFFIX).write_text(address)


def move() -> None:
    """Publish where the variables say now, with the rank that they say, if this publishes anything."""
    if own_board():
        stop()
        start()


def stop() -> None:
    """Publish nothing any more, after `start_in`."""
    global _board, _owner, _end_thread
    if _end_thread:
        atexit.unregister(_end_thread)
        _end_thread()
    _board, _owner, _end_thread = None, 0, None


def _publish(folder: Path, rank: int, stack_signal: int) -> None:
    global _board, _owner, _end_thread, _source
    _board, _owner, _end_thread, _source = None, os.getpid(), None, list
    try:
        board = Board(folder, rank)
        stack = board.path.with_suffix(STACK_SUFFIX).open("ab", buffering=0)
    except OSError:  # the launcher has exited, or this worker is on another host
        return
    faulthandler.register(stack_signal, stack, all_threads=False)  # the main thread receives it
    _board = board


def _serve_in_thread(board: Board) -> None:
    global _end_thread
    ended = threading.Event()
    thread = threading.Thread(target=_serve, args=(board, ended), name="lockstep-diagnosis", daemon=True)
    thread.start()
    board.set_flag(ANSWERS)

    def end(owner: int = os.getpid()) -> None:  # torch's records must not be read while the interpreter shuts down
        if os.getpid() == owner:
            ended.set()
            thread.join(1.0)

    atexit.register(end)
    _end_thread = end


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


def finish() -> None:
    """Publish that training is over: what follows, such as an upload, may take any time."""
    if board := own_board():
        board.set_flag(FINISHED)
        board.report("running")


def exit_early(wait_seconds: float) -> NoReturn:
    """Exit with code 0: no exit handlers, checkpoints or evaluations follow.

    Args:
        wait_seconds: At most so long, wait until the other workers of this host come here, too.
    """
    local = int(of_worker("LOCAL_WORLD_SIZE") or 1)
    with suppress(OSError):  # the launcher has exited
        folder = Path(os.environ[FOLDER])
        (folder / f"{of_worker('RANK')}.finished").touch()
        end = time.monotonic() + wait_seconds
        while len(list(folder.glob("*.finished"))) < local and time.monotonic() < end:
            time.sleep(0.02)
    if local < int(of_worker("WORLD_SIZE") or 1):
        time.sleep(REMOTE_SECONDS)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


@contextmanager
def joining() -> Iterator[None]:
    """Publish, while the block runs, that this worker waits for the others to create a process group with it."""
    board = own_board()
    if board:
        board.set_flag(JOINING)
    try:
        yield
    finally:
        if board:
            board.set_flag(JOINING, False)


def set_source(pending: Callable[[], list[str]] | None) -> None:
    """Publish the operations of hvd: `pending`, called in another thread, names the unfinished ones; None: no more."""
    global _source
    if board := own_board():
        _source = pending or list
        board.set_flag(HVD, pending is not None)


def _serve(board: Board, ended: threading.Event) -> None:
    """Publish twice a second the numbers of torch's collectives and the stack's fingerprint, and answer questions."""
    answered = 0
    while not ended.wait(INTERVAL_SECONDS):
        numbers = flight_recorder.counts()
        board.set_sample(*(numbers or (0, 0)), _fingerprint())
        board.set_flag(TORCH_GROUP, numbers is not None)
        if board.question != answered:
            answered = board.question
            with suppress(OSError, RuntimeError):  # the job is ending
                _answer(board)
            board.answered(answered)


def _answer(board: Board) -> None:
    path, scratch = board.path.with_suffix(ANSWER_SUFFIX), board.path.with_suffix(f"{ANSWER_SUFFIX}-new")
    scratch.write_text(json.dumps(own_answer()))
    scratch.replace(path)


def own_answer() -> dict[str, list[Any]]:
    """Return the unfinished operations of hvd, torch's latest collectives and the main thread's stack."""
    stack = [
        {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name}
        for frame in _frames(sys._current_frames().get(threading.main_thread().ident or 0))
    ]
    collectives = [asdict(each) for each in flight_recorder.latest()]
    return {"operations": _source()[:MAX_OPERATIONS], "collectives": collectives, "stack": stack}


def _fingerprint() -> int:
    """Return a number that changes while any thread of the program does different things."""
    own = {thread.ident for thread in threading.enumerate() if thread.name.startswith("lockstep")}
    stacks = [_frames(frame) for thread, frame in sys._current_frames().items() if thread not in own]
    return hash(tuple((id(each.f_code), each.f_lasti) for stack in stacks for each in stack)) & 0xFFFF_FFFF_FFFF_FFFF


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a stack, innermost first."""
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
