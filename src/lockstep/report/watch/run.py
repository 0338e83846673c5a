"""Find a run folder, read it repeatedly, and determine the run's state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lockstep.config.run_names import RUNS
from lockstep.errors import ConfigError
from lockstep.files.checkpoint_listing import complete, newest, step_of
from lockstep.files.fields import count, plausible
from lockstep.files.untrusted import read_yaml
from lockstep.report.watch.metrics import Metrics
from lockstep.report.watch.workers import FollowedFile, WorkerFiles, WorkerView

SILENT_SECONDS = 60.0  # minimum time without records to count as silent: a busy file system may delay them this long
SILENT_IO_RECORDS = 6  # number of missed I/O records
SILENT_RECORDS = 3  # without I/O records: multiple of the longest interval between records, which evaluations make long
MAX_WORKERS = 10_000  # maximum number of workers whose files are read; a damaged record may claim any number
_OTHER_JOBS = (
    "only `lockstep train` and lockstep.train.fit write runs; for other jobs, use `lockstep stacks` while they run, "
    "and `lockstep report` for their TensorBoard files (docs/howto/watch.md)"
)
Condition = Literal["reading", "waiting", "running", "silent", "stopped", "failed", "finished"]


@dataclass(frozen=True)
class RunState:
    """A run's condition, and its description for display."""

    condition: Condition
    text: str

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        return self.condition == "finished"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Args:
        unix_time: Time at which it was written.
        top1: Accuracy of the evaluation after its step; None if there was none.
    """

    step: int
    unix_time: float
    top1: float | None


@dataclass(frozen=True)
class RunView:
    """A snapshot of a run.

    Args:
        config: The contents of config.yaml; empty if it is not readable.
        share_read: Share of metrics.jsonl that has been read; less than 1 only while a long file is first read.
    """

    path: Path
    config: Mapping[str, Any]
    metrics: Metrics
    workers: list[WorkerView]
    last: Checkpoint | None
    best: Checkpoint | None
    share_read: float
    now: float

    @property
    def is_read(self) -> bool:
        return self.share_read == 1

    @property
    def last_sign(self) -> float | None:
        """Unix time of the newest record of any worker."""
        times = [self.metrics.last_time, *(worker.last_time for worker in self.workers)]
        return max((time for time in times if time is not None), default=None)

    @cached_property  # loops over all workers, and is read once per worker
    def silent_seconds(self) -> float:
        """Seconds without records after which the run counts as silent."""
        every = plausible(self.setting("run", "io_every", default=0))
        if every is not None and any(worker.last_time for worker in self.workers):
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
        if not self.is_read:
            return RunState("reading", f"reading the records, {100 * self.share_read:.0f} %")
        if self.metrics.is_complete:
            return RunState("finished", self.metrics.ending)
        if self.metrics.ending:
            return RunState("stopped", f"{self.metrics.ending}; to continue, use `--resume auto`")
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

    def setting(self, *names: str, default: Any = None) -> Any:
        """Return a value of the configuration, such as that of ("numerics", "precision")."""
        value: Any = self.config
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value


class RunWatch:
    """Follows the files of one run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._config: Mapping[str, Any] = {}
        self._records = FollowedFile(path / "metrics.jsonl")
        self._metrics = Metrics({})
        self._workers: dict[int, WorkerFiles] = {}

    def look(self, now: float) -> RunView:
        """Read new records, or the next portion of a long file (see `RunView.share_read`)."""
        news = self._records.read()
        if news.is_new or not self._config:
            self._config = read_config(self.path)
        if news.is_new:
            self._metrics = Metrics(self._config)
        for record in news.records:
            self._metrics.add(record)
        last, best = find_checkpoints(self.path, self._metrics)
        workers = [self._files(rank).look() for rank in self._ranks()] if news.share == 1 else []
        return RunView(self.path, self._config, self._metrics, workers, last, best, news.share, now)

    def _ranks(self) -> range:
        """Return the ranks of the last session or, before its first record, those that have log files."""
        workers = count(self._metrics.job, "workers")
        if workers is not None:
            return range(min(workers, MAX_WORKERS))
        names = [path.stem.rpartition("-")[2] for path in (self.path / "logs").glob("worker-*.log")]
        last = max((int(name) for name in names if name.isdecimal()), default=-1)
        return range(min(1 + last, MAX_WORKERS))

    def _files(self, rank: int) -> WorkerFiles:
        return self._workers.setdefault(rank, WorkerFiles(self.path, rank))


def read_config(run: Path) -> Mapping[str, Any]:
    """Return a run's configuration; empty if it is missing or incomplete."""
    try:
        config = read_yaml(run / "config.yaml")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find_checkpoints(run: Path, metrics: Metrics) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Return the last and the best checkpoint."""
    folder = run / "checkpoints"
    linked = os.path.basename(os.path.realpath(folder / "best"))  # also of a link to itself
    best = next((path for path in complete(folder) if path.name == linked), None)
    return _checkpoint(newest(folder), metrics), _checkpoint(best, metrics)


def _checkpoint(path: Path | None, metrics: Metrics) -> Checkpoint | None:
    if path is None:
        return None
    with suppress(OSError):  # it may have been removed for newer ones
        return Checkpoint(step_of(path), path.stat().st_mtime, metrics.top1_after.get(step_of(path)))
    return None


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
