"""One worker's progress in shared memory: a report takes a microsecond, and a reader never blocks the worker.

The file is mapped by the worker and by its host's node process. A reader may see a partly written report;
the next read, a second later, corrects that.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from lockstep.diagnosis.observed_steps import SIZE_BYTES as STEPS_BYTES
from lockstep.diagnosis.observed_steps import ObservedSteps
from lockstep.diagnosis.phases import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
SUFFIX = ".board"
STACK_SUFFIX, ANSWER_SUFFIX, GPU_SUFFIX = ".stack", ".answer", ".gpu"  # of files beside the board
STACK_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None  # makes a worker write its stack
VERSION = b"lockstp7"
IDENTITY = struct.Struct("=8sIiQ")  # version, pid, rank, namespace of process numbers
REPORT = struct.Struct("=QqI")  # number of reports, step, phase
FLAGS = struct.Struct("=I")
SAMPLE = struct.Struct("=QQQ")  # torch's collectives enqueued and completed; fingerprint of the stacks
QUESTION = struct.Struct("=I")
ANSWER = struct.Struct("=I")
WRITES = struct.Struct("=Q")  # number of writes of the observed steps, before and after them: equal if they are whole
AT_REPORT = IDENTITY.size
AT_FLAGS = AT_REPORT + REPORT.size
AT_SAMPLE = AT_FLAGS + FLAGS.size
AT_QUESTION = AT_SAMPLE + SAMPLE.size
AT_ANSWER = AT_QUESTION + QUESTION.size
AT_STEPS = AT_ANSWER + ANSWER.size
SIZE_BYTES = 2048
# Flags, see `BoardContent`.
TRAINER, HVD, TORCH_GROUP, ANSWERS, FINISHED, JOINING, MET, TORCH = 1, 2, 4, 8, 16, 32, 64, 128
NO_STEP = -1


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
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"{rank}-{os.getpid()}{SUFFIX}"
        self.path.unlink(missing_ok=True)  # of an earlier process with this number
        with self.path.open("x+b") as file:
            file.write(bytes(SIZE_BYTES))  # a full disk is an error here, and would be a SIGBUS in a hole of the file
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE_BYTES)
        self._count = 0
        self._step = NO_STEP
        self._flags = 0
        self._step_writes = 0
        self._lock = threading.Lock()
        self._phase = PHASES.index("starting")
        REPORT.pack_into(self._memory, AT_REPORT, 0, NO_STEP, self._phase)
        IDENTITY.pack_into(self._memory, 0, VERSION, os.getpid(), rank, _namespace())

    def report(self, phase: Phase, step: int | None = None) -> None:
        """Publish that this worker enters a phase."""
        self._phase = NUMBERS[phase]
        if step is not None:
            self._step = step
        self.touch()

    def touch(self) -> None:
        """Publish that this worker has made progress."""
        self._count += 1
        REPORT.pack_into(self._memory, AT_REPORT, self._count, self._step, self._phase)

    def set_flag(self, flag: int, is_set: bool = True) -> None:
        """Set or clear a flag: a component that reports on this board, or `ANSWERS`."""
        with self._lock:
            self._flags = self._flags | flag if is_set else self._flags & ~flag
            if flag == JOINING:
                self._flags |= MET
            FLAGS.pack_into(self._memory, AT_FLAGS, self._flags)

    @property
    def has_met(self) -> bool:
        """Whether this worker has waited for the others to create a process group with it."""
        return bool(self._flags & MET)

    def set_sample(self, enqueued: int, completed: int, fingerprint: int = 0) -> None:
        """Publish the numbers of torch's last started and last finished collective, and the stack's fingerprint."""
        SAMPLE.pack_into(self._memory, AT_SAMPLE, enqueued, completed, fingerprint)

    def publish_steps(self, steps: ObservedSteps) -> None:
        """Publish what has been observed of the program's steps."""
        self._step_writes += 1
        number, start = WRITES.pack(self._step_writes), AT_STEPS + WRITES.size
        self._memory[AT_STEPS:start] = number
        self._memory[start : start + STEPS_BYTES] = steps.pack()
        self._memory[start + STEPS_BYTES : start + STEPS_BYTES + WRITES.size] = number

    def reader(self) -> BoardReader:
        """Return a reader for this process, which also works after the file is removed."""
        return BoardReader(self.path, self._memory)

    @property
    def question(self) -> int:
        """The number of the last question; see `BoardReader.ask`."""
        return int(QUESTION.unpack_from(self._memory, AT_QUESTION)[0])

    def answered(self, question: int) -> None:
        """Publish that the answer to a question can be read."""
        ANSWER.pack_into(self._memory, AT_ANSWER, question)


NUMBERS = {name: number for number, name in enumerate(PHASES)}


class BoardReader:
    """Another process's view of a board.

    It reads the file: in a mapping of a file that the worker truncates, each access would be a SIGBUS.

    Args:
        memory: The board's memory, in its own process.

    Raises:
        ValueError: The file is not a board, or not yet.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, memory: mmap.mmap | None = None) -> None:
        self.path = path
        self._memory = memory
        self._content = bytes(SIZE_BYTES)
        version, self.pid, self.rank, namespace = IDENTITY.unpack_from(self._bytes(), 0)
        if version != VERSION or namespace != _namespace():
            raise ValueError(f"{path} is not a board of this version, or of another container")

    def read(self) -> BoardContent:
        """Return what the board shows now, or what it showed last if it has been removed or truncated."""
        with suppress(OSError, ValueError):
            self._content = self._bytes()
        count, step, phase = REPORT.unpack_from(self._content, AT_REPORT)
        (flags,) = FLAGS.unpack_from(self._content, AT_FLAGS)
        enqueued, completed, fingerprint = SAMPLE.unpack_from(self._content, AT_SAMPLE)
        (answer,) = ANSWER.unpack_from(self._content, AT_ANSWER)
        return BoardContent(
            pid=self.pid,
            rank=self.rank,
            count=count,
            step=step,
            phase=PHASES[phase] if phase < len(PHASES) else "running",
            flags=flags,
            enqueued=enqueued,
            completed=completed,
            fingerprint=fingerprint,
            answer=answer,
        )

    def steps(self) -> ObservedSteps | None:
        """Return what has been observed of the program's steps; None if nothing is, or it is being written.

        Raises:
            OSError: The file cannot be read.
            ValueError: It has been truncated.
        """
        content, start = self._bytes(), AT_STEPS + WRITES.size
        before, after = (WRITES.unpack_from(content, at)[0] for at in (AT_STEPS, start + STEPS_BYTES))
        return ObservedSteps.unpack(content[start : start + STEPS_BYTES]) if before and before == after else None

    def ask(self) -> int:
        """Ask the worker for its pending collectives; return the number that `BoardContent.answer` then reaches.

        Raises:
            OSError: The board cannot be written.
        """
        with self.path.open("r+b", buffering=0) as file:
            found = os.pread(file.fileno(), SIZE_BYTES, 0)
            number = int(QUESTION.unpack_from(found.ljust(SIZE_BYTES, b"\0"), AT_QUESTION)[0]) + 1
            os.pwrite(file.fileno(), QUESTION.pack(number), AT_QUESTION)
        return number

    def _bytes(self) -> bytes:
        if self._memory:
            return self._memory[:]
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), SIZE_BYTES, 0)
        if len(content) < SIZE_BYTES:
            raise ValueError(f"{self.path} is not a board")
        return content


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
