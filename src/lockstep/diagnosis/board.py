"""One worker's progress in shared memory: a report takes a microsecond, and a reader never blocks the worker.

The file is mapped by the worker and by its host's node process. A reader may see a partly written report;
the next read, a second later, corrects that.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from lockstep.config.mapping import from_mapping
from lockstep.diagnosis.observed_steps import ObservedSteps
from lockstep.diagnosis.phases import Phase
from lockstep.errors import ConfigError
from lockstep.files.untrusted import parse_json

PHASES: tuple[Phase, ...] = get_args(Phase)
SUFFIX = ".board"
STACK_SUFFIX, ANSWER_SUFFIX, GPU_SUFFIX = ".stack", ".answer", ".gpu"  # of files beside the board
STACK_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None  # makes a worker write its stack
VERSION = b"lockstp8"
# Flags, see `BoardContent`.
TRAINER, HVD, TORCH_GROUP, ANSWERS, FINISHED, JOINING, MET, TORCH = 1, 2, 4, 8, 16, 32, 64, 128
NO_STEP = -1


class Layout(ctypes.Structure):
    """The bytes of a board: what `BoardContent` has, and the observed steps, as JSON."""

    _fields_ = (
        ("version", ctypes.c_char * len(VERSION)),
        ("pid", ctypes.c_int32),
        ("step", ctypes.c_int64),
        # `namespace`: of process numbers. The steps are whole if all started writes are finished.
        *((name, ctypes.c_uint64) for name in ("namespace", "count", "enqueued", "completed", "fingerprint")),
        *((name, ctypes.c_uint64) for name in ("writes_started", "writes_finished")),
        *((name, ctypes.c_uint32) for name in ("rank", "phase", "flags", "question", "answer")),
        ("steps", ctypes.c_char * 3900),  # in one page: after a truncation, a write to a second one would be a SIGBUS
    )


SIZE_BYTES = ctypes.sizeof(Layout)


@dataclass(frozen=True)
class BoardContent:
    """What a board shows.

    Args:
        count: Number of reports so far.
        step: The training step, or `NO_STEP`.
        flags: `TRAINER`, `HVD` and `TORCH_GROUP`: what reports here. `ANSWERS`: a thread answers questions.
            `FINISHED`: training is over. `JOINING`: it waits for the others to create a process group.
            `MET`: it has done so. `TORCH`: it has imported torch.
        enqueued: Number of the last collective that torch recorded as started; 0 if unknown.
        completed: Number of the last one that finished.
        fingerprint: Of the stacks of all threads but Lockstep's; it changes while one does different things.
        answer: Number of the last question that the worker answered.
    """

    pid: int
    rank: int
    count: int = 0
    step: int = NO_STEP
    phase: str = "running"
    flags: int = 0
    enqueued: int = 0
    completed: int = 0
    fingerprint: int = 0
    answer: int = 0

    @property
    def is_judged(self) -> bool:
        """Whether this worker is part of a distributed job, so that a lack of progress means something."""
        return is_judged(self.flags)


def is_judged(flags: int) -> bool:
    """Return whether a worker with these flags is part of a distributed job, or waits to be."""
    return bool(flags & (TRAINER | HVD | TORCH_GROUP | JOINING)) and not flags & FINISHED


class Board:
    """A worker's own board; `report` is for one thread at a time.

    Args:
        folder: Where the node process looks for boards.

    Attributes:
        shared: The memory of the file.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"{rank}-{os.getpid()}{SUFFIX}"
        self.path.unlink(missing_ok=True)  # of an earlier process with this number
        with self.path.open("x+b") as file:
            file.write(bytes(SIZE_BYTES))  # a full disk is an error here, and would be a SIGBUS in a hole of the file
            file.flush()
            self.shared = Layout.from_buffer(mmap.mmap(file.fileno(), SIZE_BYTES))
        self._lock = threading.Lock()
        self.shared.step, self.shared.phase = NO_STEP, NUMBERS["starting"]
        self.shared.pid, self.shared.rank, self.shared.namespace = os.getpid(), rank, _namespace()
        self.shared.version = VERSION  # last: the board can be read from now on

    def report(self, phase: Phase, step: int | None = None) -> None:
        """Publish that this worker enters a phase."""
        self.shared.phase = NUMBERS[phase]
        if step is not None:
            self.shared.step = step
        self.touch()

    def touch(self) -> None:
        """Publish that this worker has made progress."""
        self.shared.count += 1

    def set_flag(self, flag: int, is_set: bool = True) -> None:
        """Set or clear a flag: a component that reports on this board, or `ANSWERS`."""
        with self._lock:
            flags = self.shared.flags | flag if is_set else self.shared.flags & ~flag
            self.shared.flags = flags | MET if flag == JOINING else flags

    @property
    def has_met(self) -> bool:
        """Whether this worker has waited for the others to create a process group with it."""
        return bool(self.shared.flags & MET)

    def set_sample(self, enqueued: int, completed: int, fingerprint: int = 0) -> None:
        """Publish the numbers of torch's last started and last finished collective, and the stack's fingerprint."""
        self.shared.enqueued, self.shared.completed, self.shared.fingerprint = enqueued, completed, fingerprint

    def publish_steps(self, steps: ObservedSteps) -> None:
        """Publish what has been observed of the program's steps."""
        text = json.dumps(asdict(steps)).encode()
        self.shared.writes_started += 1
        self.shared.steps = text
        self.shared.writes_finished += 1

    def reader(self) -> BoardReader:
        """Return a reader for this process, which also works after the file is removed."""
        return BoardReader(self.path, self.shared)

    @property
    def question(self) -> int:
        """The number of the last question; see `BoardReader.ask`."""
        return int(self.shared.question)

    def answered(self, question: int) -> None:
        """Publish that the answer to a question can be read."""
        self.shared.answer = question


NUMBERS = {name: number for number, name in enumerate(PHASES)}


class BoardReader:
    """Another process's view of a board.

    It reads the file: in a mapping of a file that the worker truncates, each access would be a SIGBUS.

    Args:
        shared: The board's memory, in its own process.

    Raises:
        ValueError: The file is not a board, or not yet.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, shared: Layout | None = None) -> None:
        self.path, self._shared = path, shared
        self._content = self._copy()
        if self._content.version != VERSION or self._content.namespace != _namespace():
            raise ValueError(f"{path} is not a board of this version, or of another container")
        self.pid, self.rank = self._content.pid, self._content.rank

    def read(self) -> BoardContent:
        """Return what the board shows now, or what it showed last if it has been removed or truncated."""
        with suppress(OSError, ValueError):
            self._content = self._copy()
        found, names = self._content, ("count", "step", "flags", "enqueued", "completed", "fingerprint", "answer")
        phase = PHASES[found.phase] if found.phase < len(PHASES) else "running"
        return BoardContent(self.pid, self.rank, phase=phase, **{name: getattr(found, name) for name in names})

    def steps(self) -> ObservedSteps | None:
        """Return what has been observed of the program's steps; None if nothing is, or it is being written.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has been truncated, or the worker has written something else.
        """
        found = self._copy()
        if not found.writes_started or found.writes_started != found.writes_finished:
            return None
        try:
            return from_mapping(ObservedSteps, parse_json(found.steps), "steps")
        except (ConfigError, TypeError) as error:
            raise ValueError(f"{self.path}: {error}") from None

    def ask(self) -> int:
        """Ask the worker for its pending collectives; return the number that `BoardContent.answer` then reaches.

        Raises:
            OSError: The board cannot be written.
        """
        place = vars(Layout)["question"]
        with self.path.open("r+b", buffering=0) as file:
            found = os.pread(file.fileno(), SIZE_BYTES, 0).ljust(SIZE_BYTES, b"\0")
            number = int(Layout.from_buffer_copy(found).question) + 1
            os.pwrite(file.fileno(), number.to_bytes(place.size, sys.byteorder), place.offset)
        return number

    def _copy(self) -> Layout:
        """Return a copy; raises ValueError if the file is too small."""
        if self._shared:
            return Layout.from_buffer_copy(self._shared)
        with self.path.open("rb", buffering=0) as file:
            return Layout.from_buffer_copy(os.pread(file.fileno(), SIZE_BYTES, 0))


def _namespace() -> int:
    """Return what distinguishes process numbers of different containers."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def boards_in(folder: Path) -> list[BoardReader]:
    """Return the readable boards of a folder, by rank."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            found.append(BoardReader(path))
        except (OSError, ValueError):  # removed, or being created
            continue
    return sorted(found, key=lambda board: (board.rank, board.pid))
