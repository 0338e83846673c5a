"""Everything that is known about one worker, collected by its host's node process without stopping it."""

from __future__ import annotations

import os
import re
import sysconfig
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lockstep
from lockstep.config.mapping import from_mapping
from lockstep.diagnosis.board import ANSWER_SUFFIX, ANSWERS, STACK_SIGNAL, STACK_SUFFIX, BoardContent, BoardReader
from lockstep.diagnosis.flight_recorder import RecordedCollective
from lockstep.files.untrusted import parse_json

ANSWER_SECONDS = 2.0
LOOK_SECONDS = 0.05
MAX_BYTES = 1 << 17  # of a stack; faulthandler prints up to 100 frames, and up to 500 characters of each name
STOPPED_STATES = ("T", "t")
HEAD = "(most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
OWN_ROOTS = (str(Path(lockstep.__file__).parent), sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Facts:
    """A process, from /proc (Linux, man 5 proc).

    Args:
        state: R running, S waiting, D waiting in the kernel, T stopped, t stopped by a debugger, Z exited; "" if gone.
        caught: Whether its main thread handles `STACK_SIGNAL`.
    """

    state: str
    is_debugged: bool = False
    caught: bool = False


def facts(pid: int) -> Facts:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Facts("")
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    handled = int(fields.get("SigCgt", "0"), 16) & ~int(fields.get("SigBlk", "0"), 16)
    caught = STACK_SIGNAL is not None and handled >> (STACK_SIGNAL - 1) & 1
    return Facts(fields.get("State", "")[:1], fields.get("TracerPid", "0") != "0", bool(caught))


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack; `is_users`: neither of an installed package nor of the standard library."""

    file: str
    line: int
    function: str
    is_users: bool = True


@dataclass(frozen=True)
class WorkerState:
    """A worker at the moment of its inspection.

    Args:
        pid: Its process; 0 if it has exited.
        exit_code: Its exit code, if it has exited.
        state: The process's state, as in `Facts`.
        is_debugged: A debugger is attached to it or runs in it.
        has_answered: It answered, or was not asked. If False, it is stopped, or a thread holds the GIL.
        stack: The main thread's frames, innermost first; empty if unknown.
        operations: Names of hvd's unfinished operations.
        collectives: Of torch: the last finished and the unfinished ones, by group.
        pending: Number of torch's unfinished collectives, if the worker was not asked for them.
    """

    rank: int
    pid: int = 0
    exit_code: int | None = None
    state: str = ""
    is_debugged: bool = False
    step: int = -1
    phase: str = "running"
    flags: int = 0
    has_answered: bool = True
    stack: tuple[Frame, ...] = ()
    operations: tuple[str, ...] = ()
    collectives: tuple[RecordedCollective, ...] = ()
    pending: int = 0

    @property
    def holds_gil(self) -> bool:
        """Whether it runs, and does not wait in the kernel, but no thread of it answers."""
        return not self.has_answered and not self.is_debugged and self.state in ("R", "S")


@dataclass(frozen=True)
class WorkerAnswer:
    """A worker's answer to a question, as `publisher.own_answer` writes it."""

    stack: tuple[Frame, ...] = ()
    operations: tuple[str, ...] = ()
    collectives: tuple[RecordedCollective, ...] = ()


DEBUGGERS = {"pdb.py", "bdb.py", "pydevd.py", "debugpy"}  # files and folders


def inspect_worker(board: BoardReader) -> WorkerState:
    """Collect the state of a worker; takes up to 4 s if its interpreter does not respond."""
    found = facts(board.pid)
    can_answer = found.state not in (*STOPPED_STATES, "Z", "")
    try:
        question = board.ask()
    except OSError:  # the worker's script has removed its board, for example
        return glance(board.read())
    answers = bool(board.read().flags & ANSWERS)
    has_answered = can_answer and answers and _until(lambda: board.read().answer >= question)
    answer = _answer(board) if has_answered else WorkerAnswer()
    if can_answer and not has_answered and found.caught:
        answer = WorkerAnswer(_stack_by_signal(board))
    return _state_of(board.read(), answer, has_answered or not answers)


def glance(progress: BoardContent) -> WorkerState:
    """Return what a worker's board shows, without asking the worker."""
    state = _state_of(progress, WorkerAnswer(), has_answered=True)
    return replace(state, pending=max(0, progress.enqueued - progress.completed))


def _state_of(progress: BoardContent, answer: WorkerAnswer, has_answered: bool) -> WorkerState:
    found = facts(progress.pid)
    return WorkerState(
        rank=progress.rank,
        pid=progress.pid,
        state=found.state,
        is_debugged=found.is_debugged or any(DEBUGGERS & set(Path(frame.file).parts) for frame in answer.stack),
        step=progress.step,
        phase=progress.phase,
        flags=progress.flags,
        has_answered=has_answered,
        stack=answer.stack,
        operations=answer.operations,
        collectives=answer.collectives,
    )


def _answer(board: BoardReader) -> WorkerAnswer:
    """Return a worker's answer; an empty one if it is unreadable: the worker may write anything to its files."""
    try:
        return _answer_of(parse_json(board.path.with_suffix(ANSWER_SUFFIX).read_bytes()))
    except (OSError, ValueError, TypeError):
        return WorkerAnswer()


def _answer_of(found: Any) -> WorkerAnswer:
    """Return a worker's answer from JSON.

    Raises:
        ValueError, TypeError: It is malformed.
    """
    answer = from_mapping(WorkerAnswer, found, "answer")
    return replace(answer, stack=tuple(_frame(frame.file, frame.line, frame.function) for frame in answer.stack))


def _stack_by_signal(board: BoardReader) -> tuple[Frame, ...]:
    """Have faulthandler write the main thread's stack, which works even while a thread holds the GIL."""
    assert STACK_SIGNAL is not None
    path = board.path.with_suffix(STACK_SUFFIX)
    sizes = [_size(path)]
    with suppress(OSError):
        os.kill(board.pid, STACK_SIGNAL)

    def is_complete() -> bool:
        sizes.append(_size(path))
        return sizes[0] < sizes[-2] == sizes[-1]

    _until(is_complete)
    return last_stack(_read(path, sizes[0]))


def _until(holds: Callable[[], bool]) -> bool:
    """Wait for a condition; return whether it holds in time."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def own_state(board: BoardReader, answer: Mapping[str, Any]) -> WorkerState:
    """Return the state of this process, from its own board and `publisher.own_answer`."""
    return _state_of(board.read(), _answer_of(answer), has_answered=True)


def without_board(rank: int, pid: int) -> WorkerState:
    """Return what can be known of a worker that publishes nothing, such as a shell script."""
    found = facts(pid)
    return WorkerState(rank, pid, state=found.state, is_debugged=found.is_debugged)


def last_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the last stack in faulthandler's output, innermost first."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := FRAME.match(line):
            frames.append(_frame(match[1], int(match[2]), match[3]))
        elif line.endswith(HEAD):
            frames = []
    return tuple(frames)


def _frame(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, not INSTALLED.search(file) and not file.startswith(OWN_ROOTS))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, start: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
