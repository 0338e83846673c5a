"""Find a run folder, follow the files that its workers append to, and determine the run's state."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.config.run_paths import RUNS, complete, newest, step_of
from lockstep.errors import LOST_PEER, ConfigError
from lockstep.files.io_records import worker_file
from lockstep.files.io_totals import KIND
from lockstep.files.jsonl import count, number, one_line, parse_record, plausible
from lockstep.files.untrusted import open_plain, read_yaml
from lockstep.report.watch.metrics import Metrics

SILENT_SECONDS = 60.0  # minimum time without records to count as silent: a busy file system may delay them this long
SILENT_IO_RECORDS = 6  # number of missed I/O records
SILENT_RECORDS = 3  # without I/O records: multiple of the longest interval between records, which evaluations make long
MAX_WORKERS = 10_000  # maximum number of workers whose files are read; a damaged record may claim any number
_OTHER_JOBS = (
    "`lockstep train`, lockstep.train.fit and `lockstep run --observe-dir DIR` write them; for other jobs, use "
    "`lockstep stacks` while they run (docs/howto/report.md)"
)
PORTION_BYTES = 16 << 20  # read at a time
IO_BYTES = 8 << 10  # read from the end of the I/O records, about 25 records
LOG_BYTES = 16 << 10  # read from the end of the log, enough for a traceback
LINE = re.compile(rb"^\d{4}-\d\d-\d\d \S+ worker \d+ ([A-Z]+) ", re.MULTILINE)
RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Interrupt|Exit)\b.*)$")
Condition = Literal["waiting", "running", "silent", "stopped", "failed", "finished"]


class NewRecords(NamedTuple):
    """Newly read records.

    Args:
        is_new: Whether the file was replaced since the last read; earlier records are then obsolete.
        has_more: Whether the file has more complete records.
    """

    records: list[dict[str, Any]]
    is_new: bool = False
    has_more: bool = False


class FollowedFile:
    """Reads records appended to a file since the last read.

    A resumed run replaces the file (`lockstep.files.jsonl.keep_records`); the new file is then read from its start.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file_id: tuple[int, int] | None = None
        self._offset = 0

    def read(self, most_bytes: int = PORTION_BYTES) -> NewRecords:
        """Return the records of complete new lines, reading up to `most_bytes`; empty while there is no file."""
        try:
            with open_plain(self._path) as file:
                facts = os.fstat(file.fileno())
                file_id, size_bytes = (facts.st_dev, facts.st_ino), facts.st_size
                is_new = file_id != self._file_id or size_bytes < self._offset
                if is_new:
                    self._file_id, self._offset = file_id, 0
                file.seek(self._offset)
                data = file.read(min(most_bytes, size_bytes - self._offset))  # no larger buffer than needed
        except (OSError, ValueError):
            return NewRecords([])
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be incomplete
        if not whole and len(data) == most_bytes:
            whole = data  # too long for a record: skip it
        self._offset += len(whole)
        records = [record for line in whole.splitlines() if (record := parse_record(line)) is not None]
        return NewRecords(records, is_new, len(data) == most_bytes)


@dataclass(frozen=True)
class WatchedWorker:
    """One worker, by its files.

    Args:
        last_time: Unix time of its newest I/O record; None if there is none.
        read_rate: Bytes per second that it read, by that record.
        failure: The error with which its log ends; "" if it does not end with an error.
    """

    rank: int
    last_time: float | None = None
    read_rate: float | None = None
    failure: str = ""

    @property
    def has_lost_peer(self) -> bool:
        """Whether it failed only because a peer disconnected."""
        return any(message in self.failure for message in LOST_PEER)


def find_worker(run: Path, rank: int) -> WatchedWorker:
    """Read the ends of a worker's files; invalid records are skipped."""
    time = rate = None
    for line in reversed(_tail(worker_file(run, rank), IO_BYTES).splitlines()):
        record = parse_record(line) or {}
        if record.get("kind") == KIND and (time := number(record, "unix_time")) is not None:
            read, seconds = number(record, "read_bytes"), number(record, "seconds")
            rate = plausible(read / seconds) if read is not None and seconds and seconds > 0 else None
            break
    return WatchedWorker(rank, time, rate, last_error(_tail(run / "logs" / f"worker-{rank}.log", LOG_BYTES)))


def _tail(path: Path, most_bytes: int) -> bytes:
    with suppress(OSError, ValueError), open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes)
    return b""


def last_error(log: bytes) -> str:
    """Return the error with which a log ends, on one line; "" if its last entry is not an error."""
    entries = list(LINE.finditer(log))
    if not entries:  # the end of a long traceback
        return _raised(log) if b"Traceback" in log or b'\n  File "' in log else ""
    return _raised(log[entries[-1].end() :]) if entries[-1][1] in (b"ERROR", b"CRITICAL") else ""


def _raised(trace: bytes) -> str:
    lines = [line for line in trace.decode(errors="replace").splitlines() if line.strip()]
    named = [match[1] for line in lines if (match := RAISED.match(line))]
    return one_line(named[-1] if named else lines[-1].strip() if lines else "an error")


class RunState(NamedTuple):
    """A run's condition, and its description for display."""

    condition: Condition
    text: str


@dataclass(frozen=True)
class RunView:
    """A snapshot of a run.

    Args:
        config: The contents of config.yaml; empty if it is not readable.
        checkpoints: The step and the Unix time of the "last" and the "best" checkpoint, as far as there are any.
    """

    path: Path
    config: Mapping[str, Any]
    metrics: Metrics
    workers: list[WatchedWorker]
    checkpoints: Mapping[str, tuple[int, float]]
    now: float

    @property
    def last_sign(self) -> float | None:
        """Unix time of the newest record of any worker."""
        times = [self.metrics.last_time, *(worker.last_time for worker in self.workers)]
        return max((time for time in times if time is not None), default=None)

    @cached_property  # loops over all workers, and is read once per worker
    def silent_seconds(self) -> float:
        """Seconds without records after which the run counts as silent."""
        every = number(self.config, "run", "io_every")  # unknown in custom loops and observed programs
        if every and any(worker.last_time for worker in self.workers):
            return max(SILENT_SECONDS, SILENT_IO_RECORDS * every)
        return max(SILENT_SECONDS, SILENT_RECORDS * self.metrics.longest_gap_seconds)

    @property
    def _seconds_without_a_record(self) -> float:
        """Seconds since the last record in metrics.jsonl; 0 until two records show the usual interval.

        I/O records continue while workers hang, so they do not show progress.
        """
        last = self.metrics.last_time
        return self.now - last if last is not None and self.metrics.longest_gap_seconds else 0.0

    @property
    def state(self) -> RunState:
        ago = f"last activity {duration(self.now - self.last_sign)} ago" if self.last_sign else ""
        failures = sorted((worker for worker in self.workers if worker.failure), key=lambda one: one.has_lost_peer)
        if self.metrics.is_complete:
            return RunState("finished", self.metrics.ending)
        if self.metrics.ending and self.metrics.program:
            return RunState("failed", self.metrics.ending)
        if self.metrics.ending:
            how = "start the same command" if self.metrics.script else "use `--resume auto`"
            return RunState("stopped", f"{self.metrics.ending}; to continue, {how}")
        if failures:
            return RunState("failed", f"worker {failures[0].rank} failed: {failures[0].failure}")
        if self.last_sign is None:
            return RunState("waiting", "no records yet")
        if self.now - self.last_sign > self.silent_seconds:
            return RunState("silent", f"{ago}; the run was killed or is hung")
        if self._seconds_without_a_record > max(SILENT_SECONDS, SILENT_RECORDS * self.metrics.longest_gap_seconds):
            since = duration(self._seconds_without_a_record)
            return RunState("silent", f"no step recorded for {since}, but workers are active: long evaluation or hang")
        return RunState("running", f"running, {ago}")


class RunWatch:
    """Follows the files of one run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._config: Mapping[str, Any] = {}
        self._records = FollowedFile(path / "metrics.jsonl")
        self._metrics = Metrics({})

    def look(self, now: float) -> RunView:
        """Read new records."""
        has_more = True
        while has_more:
            records, is_new, has_more = self._records.read()
            if is_new or not self._config:
                self._config = read_config(self.path)
            if is_new:
                self._metrics = Metrics(self._config)
            self._metrics.take_all(records)
        workers = [find_worker(self.path, rank) for rank in self._ranks()]
        return RunView(self.path, self._config, self._metrics, workers, find_checkpoints(self.path), now)

    def _ranks(self) -> range:
        """Return the ranks of the last session or, before its first record, those that have log files."""
        workers = count(self._metrics.start, "workers")
        if workers is not None:
            return range(min(workers, MAX_WORKERS))
        names = [path.stem.rpartition("-")[2] for path in (self.path / "logs").glob("worker-*.log")]
        last = max((int(name) for name in names if name.isdecimal()), default=-1)
        return range(min(1 + last, MAX_WORKERS))


def read_config(run: Path) -> Mapping[str, Any]:
    """Return a run's configuration; empty if it is missing or incomplete."""
    try:
        config = read_yaml(run / "config.yaml")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find_checkpoints(run: Path) -> dict[str, tuple[int, float]]:
    """Return step and Unix time of the "last" and the "best" checkpoint, as far as there are any."""
    folder = run / "checkpoints"
    linked = os.path.basename(os.path.realpath(folder / "best"))  # also of a link to itself
    named = {"last": newest(folder), "best": next((path for path in complete(folder) if path.name == linked), None)}
    found: dict[str, tuple[int, float]] = {}
    for name, path in named.items():
        with suppress(OSError):  # it may have been removed for newer ones
            found |= {name: (step_of(path), path.stat().st_mtime)} if path else {}
    return found


def find_run(named: Path | None) -> Path:
    """Return `named` if it is a run folder, else the newest one in it or in its runs/; for None, the newest in runs/.

    Raises:
        ConfigError: There is no run folder.
    """
    folder = RUNS if named is None else named
    if named is not None and not named.exists():
        raise ConfigError(f"{named}: no such folder; pass a run folder, or omit it for the newest run in {RUNS}/")
    if _is_run(folder):
        return folder
    runs = [path for pattern in ("*", f"{RUNS}/*") for path in folder.glob(pattern) if _is_run(path)]
    if runs:
        return max(runs, key=_changed)
    if named is None:
        raise ConfigError(f"no runs in {RUNS}/; pass a run folder: lockstep watch RUN; {_OTHER_JOBS}")
    raise ConfigError(f"{named}: no run found; a run folder contains config.yaml or metrics.jsonl; {_OTHER_JOBS}")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))


def _changed(run: Path) -> float:
    times = [path.stat().st_mtime for name in ("metrics.jsonl", "config.yaml") if (path := run / name).exists()]
    return max(times, default=0.0)


def duration(seconds: float) -> str:
    """Format a time in its two largest units, such as "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
