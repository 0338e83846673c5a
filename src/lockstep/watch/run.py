"""A run folder as it is now: found, looked at again and again, and judged."""

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
from lockstep.watch.metrics import Metrics
from lockstep.watch.tail import Tail
from lockstep.watch.workers import WorkerFiles, WorkerView

SILENT_SECONDS = 60.0  # without any record, at least: a busy file system may take as long
SILENT_IO_RECORDS = 6
SILENT_RECORDS = 3  # where nobody keeps I/O records: the longest time between others, which an evaluation may take
MOST_WORKERS = 10_000  # that are looked at: a damaged record may name any number
Condition = Literal["reading", "waiting", "running", "silent", "stopped", "failed", "finished"]


@dataclass(frozen=True)
class RunState:
    """How a run is, in one word and in words for people."""

    condition: Condition
    text: str

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come of this run."""
        return self.condition == "finished"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Args:
        unix_time: When it was written.
        top1: Of the evaluation after its step; None where there was none.
    """

    step: int
    unix_time: float
    top1: float | None


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Args:
        config: Its config.yaml; empty if that cannot be read.
        share_read: How much of the records has been read: less than 1 only at the first looks at a long file.
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

    @cached_property  # of all workers, and asked for each
    def silent_seconds(self) -> float:
        """How long a run may be silent and still be thought to run."""
        every = plausible(self.setting("run", "io_every", default=0))
        if every is not None and any(worker.last_time for worker in self.workers):
            return max(SILENT_SECONDS, SILENT_IO_RECORDS * every)
        return max(SILENT_SECONDS, SILENT_RECORDS * self.metrics.longest_gap_seconds)

    @property
    def _seconds_without_a_record(self) -> float:
        """How long no step was recorded, once two records have shown how often there is one: who waits lives, too."""
        last = self.metrics.last_time
        return self.now - last if last is not None and self.metrics.longest_gap_seconds else 0.0

    @property
    def state(self) -> RunState:
        ago = f"last sign of life {duration(self.now - self.last_sign)} ago" if self.last_sign else ""
        failures = sorted((worker for worker in self.workers if worker.failure), key=lambda one: one.has_lost_peer)
        if not self.is_read:
            return RunState("reading", f"reading the records, {100 * self.share_read:.0f} %")
        if self.metrics.is_complete:
            return RunState("finished", self.metrics.ending)
        if self.metrics.ending:
            return RunState("stopped", f"{self.metrics.ending}; `--resume auto` goes on")
        if failures:
            return RunState("failed", f"worker {failures[0].rank} failed: {failures[0].failure}")
        if self.last_sign is None:
            return RunState("waiting", "no records yet")
        if self.now - self.last_sign > self.silent_seconds:
            return RunState("silent", f"{ago}; it has ended without a word, or hangs")
        if self._seconds_without_a_record > max(SILENT_SECONDS, SILENT_RECORDS * self.metrics.longest_gap_seconds):
            since = duration(self._seconds_without_a_record)
            return RunState("silent", f"alive, but no step recorded for {since}: a long evaluation, or it hangs")
        return RunState("running", f"running, {ago}")

    def setting(self, *names: str, default: Any = None) -> Any:
        """A value of the configuration, such as of ("numerics", "precision")."""
        value: Any = self.config
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value


class RunWatch:
    """Follows the files of one run folder."""

    def __init__(self, path: Path):
        self.path = path
        self._config: Mapping[str, Any] = {}
        self._records = Tail(path / "metrics.jsonl")
        self._metrics = Metrics({})
        self._workers: dict[int, WorkerFiles] = {}

    def look(self, now: float) -> RunView:
        """Read what is new; of a long file a portion, see `RunView.share_read`."""
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
        """The workers of the last session; before its record, those that have files."""
        workers = count(self._metrics.job, "workers")
        if workers is not None:
            return range(min(workers, MOST_WORKERS))
        names = [path.stem.rpartition("-")[2] for path in (self.path / "logs").glob("worker-*.log")]
        last = max((int(name) for name in names if name.isdecimal()), default=-1)
        return range(min(1 + last, MOST_WORKERS))

    def _files(self, rank: int) -> WorkerFiles:
        return self._workers.setdefault(rank, WorkerFiles(self.path, rank))


def read_config(run: Path) -> Mapping[str, Any]:
    """A run's configuration; empty if there is none, or a half-written one."""
    try:
        config = read_yaml(run / "config.yaml")
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find_checkpoints(run: Path, metrics: Metrics) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The last checkpoint and the best."""
    folder = run / "checkpoints"
    linked = os.path.basename(os.path.realpath(folder / "best"))  # also of a link to itself
    best = next((path for path in complete(folder) if path.name == linked), None)
    return _checkpoint(newest(folder), metrics), _checkpoint(best, metrics)


def _checkpoint(path: Path | None, metrics: Metrics) -> Checkpoint | None:
    if path is None:
        return None
    with suppress(OSError):  # removed meanwhile, for newer ones
        return Checkpoint(step_of(path), path.stat().st_mtime, metrics.top1_after.get(step_of(path)))
    return None


def find_run(named: Path | None) -> Path:
    """The run folder to watch: the one named, or the newest in it; None: the newest in runs/.

    Raises:
        ConfigError: There is none.
    """
    folder = RUNS if named is None else named
    if named is not None and not named.exists():
        raise ConfigError(f"there is no folder {named}; name a run folder, or leave it out for the newest in {RUNS}/")
    if _is_run(folder):
        return folder
    runs = [path for path in folder.glob("*") if _is_run(path)]
    if runs:
        return max(runs, key=_changed)
    if named is None:
        raise ConfigError(f"there is no run in {RUNS}/ here; name a run folder: lockstep watch RUN")
    raise ConfigError(f"{named} is no run folder and holds none: a run has a config.yaml or a metrics.jsonl")


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))


def _changed(run: Path) -> float:
    times = [path.stat().st_mtime for name in ("metrics.jsonl", "config.yaml") if (path := run / name).exists()]
    return max(times, default=0.0)


def duration(seconds: float) -> str:
    """A time as people read it, in its two largest units."""
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
