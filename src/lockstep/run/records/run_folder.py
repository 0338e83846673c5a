"""The run folder: config.yaml, environment.json, metrics.jsonl, io/, tensorboard/, checkpoints/, logs/.

A job locks its folder, so that no other job writes to it.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.mapping import to_mapping
from lockstep.config.run_paths import RUNS, new_run_path, runs_of
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.files.atomic import replacing
from lockstep.files.folder_lock import Owner, hold_folder
from lockstep.files.jsonl import write_json
from lockstep.files.output import say
from lockstep.files.resilient_file import ResilientFile
from lockstep.files.untrusted import printable_name
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.world.batch_job import describe_batch_job, series_of
from lockstep.world.machine import describe_commits, describe_machine
from lockstep.world.world import World

LOGGERS = ("lockstep", "py.warnings")
logger = logging.getLogger("lockstep")


@dataclass(frozen=True)
class RunFolder:
    """A run folder and the paths of its files.

    Args:
        check: Raises LockstepError if another job is known to have taken over the folder. Cheap.
        confirm: Like `check`, but asks the file system; call it before renaming or removing anything in the folder.

    Workers that do not write to the folder check nothing.
    """

    path: Path
    check: Callable[[], None] = lambda: None
    confirm: Callable[[], None] = lambda: None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"worker-{rank}.log"

    def create(self, world: World, config: TrainConfig | None = None, before: RunFolder | None = None) -> None:
        """Create the folder, and write the environment and, if given, the configuration.

        Args:
            before: Another folder that the run is resumed from, whose records begin this one's.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if before is not None and before.metrics.is_file():
                shutil.copyfile(before.metrics, self.metrics)
            if config is not None:
                text = yaml.safe_dump(to_mapping(_repeatable(config)), sort_keys=False)
                with replacing(self.path / "config.yaml") as partial:  # writing to a pipe at this path would block
                    partial.write_text(text, encoding="utf-8")
            write_json(self.path / "environment.json", describe_environment(world))
        except OSError as error:
            raise ConfigError(
                f"run folder {self.path} cannot be written: {error}; choose another (--run-dir)"
            ) from None


def _repeatable(config: TrainConfig) -> TrainConfig:
    """Return the configuration without settings that apply to a single start."""
    run = replace(config.run, run_dir=None, resume=None, start_epoch=None, evaluate=False, time_limit=None)
    return replace(config, run=replace(run, quiet=False, verbose=False))


def newest_run_path(config: TrainConfig) -> Path | None:
    """Return the newest run of the same data set and architecture that has a checkpoint."""
    found = [newest for path in runs_of(config) if (newest := checkpoint_folder.newest(path / "checkpoints"))]
    latest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return latest.parent.parent if latest else None


class LogFile(logging.FileHandler):
    """A worker's log file that tolerates a full disk without an error message per line."""

    def __init__(self, path: Path):
        super().__init__(path, encoding="utf-8", delay=True)
        self._is_closed = False
        self._file = ResilientFile(path, lambda line: say(f"lockstep: {line}"))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record))

    def close(self) -> None:
        if not self._is_closed:  # also called at interpreter exit
            self._is_closed = True
            self._file.close(restores=False)  # the user may have removed the folder of a run that is over
        super().close()


def start_log(path: Path, rank: int) -> None:
    """Write this worker's log and Python's warnings to a file, instead of an earlier run's file."""
    for earlier in [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(earlier)
        earlier.close()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = LogFile(path)
    except OSError as error:
        way_out = "fix that, or choose another folder (--run-dir)"
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {way_out}") from None
    handler.setFormatter(logging.Formatter(f"%(asctime)s worker {rank} %(levelname)s %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logging.captureWarnings(True)


_commits: dict[str, str] = {}


def describe_environment(world: World) -> dict[str, Any]:
    """Return the machine, the versions and the command, as needed to repeat a run."""
    # After a loss, others would wait: Git takes long for a large checkout on a network file system.
    commits = _commits if _commits and world.rank_info.restart else describe_commits()
    _commits.update(commits)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        **describe_machine(world.size),
        **commits,
    }


LOCKED_HINT = "wait for that job to finish, stop it, or choose another folder (--run-dir)"


@contextmanager
def holding_run(config: TrainConfig, world: World) -> Iterator[RunFolder]:
    """Lock the run folder while the block runs. Call it on all workers; rank 0 holds the lock.

    Raises:
        ConfigError: Another job holds the lock, or the folder cannot be written; raised on all workers.
        CheckpointError: --resume names a path without a checkpoint; raised on all workers.
    """
    lock, made = None, list[Path]()

    def hold() -> str:
        nonlocal lock
        path = config.run.run_dir or RUNS
        try:
            path = _make_folder(config, made)
            owner = Owner("lockstep train", describe_batch_job(os.environ), series_of(world.rank_info, os.environ))
            lock = hold_folder(path, owner, LOCKED_HINT)
        except OSError as error:
            reason = f"cannot be written: {error}; choose another (--run-dir)"
            raise ConfigError(f"run folder {printable_name(str(path))} {reason}") from None
        return str(path)

    try:
        path = Path(world.on_main(hold))
        yield RunFolder(path, lock.check, lock.confirm) if lock else RunFolder(path)
    finally:
        if lock:
            lock.close()
        for each in reversed(made):  # if the run ended before writing anything
            with suppress(OSError):
                each.rmdir()


def unknown_to_others(config: TrainConfig, world: World) -> RunFolder:
    """Return the run folder without a lock, for folders that no other job uses."""
    return RunFolder(Path(world.from_main(str(config.run.run_dir or new_run_path(config)))))


def resumed_run_path(config: TrainConfig) -> Path | None:
    """Return the folder of the run to resume, ignoring --run-dir; None for a new run."""
    resume = config.run.resume
    if resume is None or config.run.start_epoch is not None or Path(resume).is_file():  # files are from older scripts
        return None
    if resume == "auto":
        return newest_run_path(config)
    return checkpoint_folder.run_folder_of(checkpoint_folder.locate(Path(resume)))


def _check_name(path: Path) -> None:
    """Reject a name that is not UTF-8, which safetensors needs."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = printable_name(str(path))
        raise ConfigError(f"run folder {name}: its name is not UTF-8; choose another (--run-dir)") from None


def _make_folder(config: TrainConfig, made: list[Path]) -> Path:
    """Create the run folder and its parents; new folders are appended to `made`."""
    given = config.run.run_dir or resumed_run_path(config)
    if given:
        _check_name(given)
    while True:
        path = given or new_run_path(config)
        missing = [each for each in (path, *path.parents) if not each.exists()]
        for each in reversed(missing):
            try:
                each.mkdir()
            except FileExistsError:
                if not each.is_dir():
                    raise
            else:
                made.append(each)
        if given or made[-1:] == [path]:  # a generated name belongs to the job that created it
            return path
