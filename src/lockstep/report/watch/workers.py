"""Each worker's files in the run folder: its I/O records and its log."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LOST_PEER
from lockstep.files.fields import number, one_line, plausible
from lockstep.files.io_records import KIND, worker_file
from lockstep.files.untrusted import open_plain
from lockstep.report.watch.tail import FollowedFile

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
