"""The files that workers append to, followed without rereading them, and the state of each worker."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LOST_PEER
from lockstep.files.fields import number, one_line, plausible
from lockstep.files.io_records import KIND, worker_file
from lockstep.files.jsonl import parse_record
from lockstep.files.untrusted import open_plain

PORTION_BYTES = 16 << 20  # read at a time; the view is redrawn after each portion
SKIM_BYTES = 32 << 20  # in longer files, as after a day of training, only some step records are parsed
STEP = b'{"kind": "step"'


class NewRecords(NamedTuple):
    """Newly read records.

    Args:
        is_new: Whether the file was replaced since the last read; earlier records are then obsolete.
        share: Share of the file that has been read, from 0 to 1.
    """

    records: list[dict[str, Any]]
    is_new: bool = False
    share: float = 1.0


class FollowedFile:
    """Reads records appended to a file since the last read.

    A resumed run replaces the file (`lockstep.files.jsonl.keep_records`); the new file is then read from its start.

    Args:
        last_bytes: Start this many bytes before the end of the file; None to start at the beginning.
    """

    def __init__(self, path: Path, last_bytes: int | None = None):
        self._path, self._last_bytes = path, last_bytes
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._every = 1  # every n-th step record is parsed
        self._steps = 0

    def read(self, most_bytes: int = PORTION_BYTES) -> NewRecords:
        """Return the records of complete new lines, reading up to `most_bytes`; empty while there is no file."""
        try:
            with open_plain(self._path) as file:
                status = _status(file.fileno())
                is_new = status.file_id != self._file_id or status.size_bytes < self._offset
                if is_new:
                    self._file_id = status.file_id
                    self._offset = max(0, status.size_bytes - self._last_bytes) if self._last_bytes else 0
                    self._every = 1 + (status.size_bytes - self._offset) // SKIM_BYTES
                file.seek(self._offset)
                data = file.read(most_bytes)
        except (OSError, ValueError):
            return NewRecords([])
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        if not whole and len(data) == most_bytes:
            whole = data  # too long for a record: skip it
        self._offset += len(whole)
        lines = whole.splitlines()
        records = [record for line in self._chosen(lines) if (record := parse_record(line)) is not None]
        if len(data) < most_bytes:
            self._every = 1
            return NewRecords(records, is_new)
        return NewRecords(records, is_new, min(1.0, self._offset / status.size_bytes))

    def _chosen(self, lines: list[bytes]) -> Iterator[bytes]:
        """Yield the lines to parse: all of them, except most step records on the first read of a long file."""
        for line in lines[:-1]:
            if self._every > 1 and line.startswith(STEP):
                self._steps += 1
                if self._steps % self._every:
                    continue
            yield line
        yield from lines[-1:]


class _Status(NamedTuple):
    file_id: tuple[int, int]
    size_bytes: int


def _status(descriptor: int) -> _Status:
    facts = os.fstat(descriptor)
    return _Status((facts.st_dev, facts.st_ino), facts.st_size)


IO_BYTES = 64 << 10  # read from the end of the I/O records, about 200 records
LOG_BYTES = 16 << 10  # read from the end of the log, enough for a traceback
RATES = 60
LINE = re.compile(rb"^\d{4}-\d\d-\d\d \S+ worker \d+ ([A-Z]+) ", re.MULTILINE)
RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Interrupt|Exit)\b.*)$")


@dataclass
class WorkerView:
    """The state of a worker according to its files.

    Args:
        last_time: Unix time of its newest I/O record; None if there is none.
        read_rates: Read rates of its latest records, in bytes/s.
        log_bytes: Size of its log; None if there is none.
        failure: The error with which its log ends; "" if it does not end with an error.
    """

    rank: int
    last_time: float | None = None
    read_rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))
    log_bytes: int | None = None
    failure: str = ""

    @property
    def has_lost_peer(self) -> bool:
        """Whether it failed only because a peer disconnected."""
        return any(message in self.failure for message in LOST_PEER)


class WorkerFiles:
    """Follows the files of one worker."""

    def __init__(self, run: Path, rank: int):
        self.worker = WorkerView(rank)
        self._io = FollowedFile(worker_file(run, rank), IO_BYTES)
        self._log = run / "logs" / f"worker-{rank}.log"

    def look(self) -> WorkerView:
        """Read new records and the log; return the worker's state."""
        for record in self._io.read().records:
            if record.get("kind") == KIND:
                self._add(record)
        self._read_log()
        return self.worker

    def _add(self, record: Mapping[str, Any]) -> None:
        """Add an I/O record; missing and invalid fields are ignored."""
        time = number(record, "unix_time")
        read, seconds = number(record, "read_bytes"), number(record, "seconds")
        if time is None:
            return
        self.worker.last_time = time
        if read is not None and seconds is not None and seconds > 0:
            rate = plausible(read / seconds)
            if rate is not None:
                self.worker.read_rates.append(rate)

    def _read_log(self) -> None:
        try:
            size = self._log.stat().st_size
            if size == self.worker.log_bytes:
                return
            with open_plain(self._log) as file:
                file.seek(max(0, size - LOG_BYTES))
                self.worker.failure = last_error(file.read())
            self.worker.log_bytes = size
        except (OSError, ValueError):
            self.worker.log_bytes = None


def last_error(log: bytes) -> str:
    """Return the error with which a log ends, on one line; "" if its last entry is not an error."""
    entries = list(LINE.finditer(log))
    if not entries:  # the end of a long traceback
        return _raised(log) if b"Traceback" in log or b'\n  File "' in log else ""
    return _raised(log[entries[-1].end() :]) if entries[-1][1] in (b"ERROR", b"CRITICAL") else ""


def _raised(trace: bytes) -> str:
    """Return the line of a traceback that has the exception."""
    lines = [line for line in trace.decode(errors="replace").splitlines() if line.strip()]
    named = [match[1] for line in lines if (match := RAISED.match(line))]
    return one_line(named[-1] if named else lines[-1].strip() if lines else "an error")
