"""Lock a run folder while a job uses it, so that no other job writes to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.run_names import RUNS, new_run_path
from lockstep.config.schema import TrainConfig
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.files.folder_lock import Owner, hold_folder
from lockstep.files.untrusted import printable_name
from lockstep.train.run_folder import RunFolder, newest_run_path, run_of
from lockstep.world.job_series import describe_batch_job, series_of
from lockstep.world.world import World

LOCKED_HINT = "wait for that job to finish, stop it, or choose another folder with --run-dir"


def _nothing() -> None:
    """Check nothing, on workers that do not write to the folder."""


@dataclass(frozen=True)
class HeldRun:
    """A run folder locked by this job.

    Args:
        check: Raises LockstepError if another job is known to have taken over the folder. Cheap.
        confirm: Like `check`, but asks the file system; call it before renaming or removing anything in the folder.
    """

    folder: RunFolder
    check: Callable[[], None] = _nothing
    confirm: Callable[[], None] = _nothing


@contextmanager
def holding_run(config: TrainConfig, world: World) -> Iterator[HeldRun]:
    """Lock the run folder while the block runs. Call it on all workers; rank 0 holds the lock.

    Raises:
        ConfigError: Another job holds the lock, or the folder cannot be written; raised on all workers.
        CheckpointError: --resume names a path without a checkpoint; raised on all workers.
    """
    lock, made, failure = None, list[Path](), ["", ""]
    path = config.run.run_dir or RUNS
    try:
        if world.is_main:
            try:
                path = _make_folder(config, made)
                owner = Owner("lockstep train", describe_batch_job(os.environ), series_of(world.rank_info, os.environ))
                lock = hold_folder(path, owner, LOCKED_HINT)
            except LockstepError as error:
                failure = [type(error).__name__, str(error)]
            except OSError as error:
                reason = f"cannot be written: {error}; choose another with --run-dir"
                failure = [ConfigError.__name__, f"run folder {printable_name(str(path))} {reason}"]
        text, kind, problem = world.from_main([str(path), *failure])
        if kind:
            kinds = {each.__name__: each for each in (CheckpointError, ConfigError)}
            raise kinds.get(kind, LockstepError)(problem)
        folder = RunFolder(Path(text))
        yield HeldRun(folder, lock.check, lock.confirm) if lock else HeldRun(folder)
    finally:
        if lock:
            lock.close()
        for each in reversed(made):  # if the run ended before writing anything
            with suppress(OSError):
                each.rmdir()


def unknown_to_others(config: TrainConfig, world: World) -> HeldRun:
    """Return the run folder without a lock, for folders that no other job knows."""
    return HeldRun(RunFolder(Path(world.from_main(str(config.run.run_dir or new_run_path(config))))))


def resumed_run_path(config: TrainConfig) -> Path | None:
    """Return the folder of the run to resume, ignoring --run-dir; None for a new run.

    Raises:
        CheckpointError: --resume names a path without a checkpoint.
    """
    resume = config.run.resume
    if resume is None or config.run.start_epoch is not None or Path(resume).is_file():  # files are from older scripts
        return None
    return newest_run_path(config) if resume == "auto" else run_of(Path(resume))


def check_writable(path: Path) -> None:
    """Check that a run folder can be created and written to, without creating it.

    Raises:
        ConfigError: It cannot.
    """
    _check_name(path)
    there = next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        why = "cannot be written to" if there.is_dir() else "is not a folder"
        raise ConfigError(f"run folder {path} cannot be written: {there} {why}; choose another with --run-dir")


def _check_name(path: Path) -> None:
    """Reject at the start a name that would make checkpoints unreadable.

    Raises:
        ConfigError: The name is not UTF-8, which safetensors needs.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = printable_name(str(path))
        raise ConfigError(f"run folder {name}: its name is not UTF-8; choose another with --run-dir") from None


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
