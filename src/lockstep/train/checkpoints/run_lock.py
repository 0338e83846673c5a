"""Lock a run folder while a job uses it, so that no other job writes to it.

The job's restarts (`--max-restarts`) and the later runs of a requeued Slurm job need not wait for the lock. Other batch
systems do not number the runs of a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.run_names import RUNS, new_run_path
from lockstep.config.schema import TrainConfig
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.files.folder_lock import FolderLock, Owner, hold_folder
from lockstep.files.untrusted import printable_name
from lockstep.train.run_folder import RunFolder, newest_run_path, run_of
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

BATCH_JOBS = (("Slurm", "SLURM_JOB_ID"), ("PBS", "PBS_JOBID"), ("LSF", "LSB_JOBID"), ("Cobalt", "COBALT_JOBID"))
LOCKED_HINT = "wait for that job to finish, stop it, or choose another folder with --run-dir"


@dataclass(frozen=True)
class HeldRun:
    """A run folder that no other job uses; on rank 0, with its lock, unless no other job knows the folder."""

    folder: RunFolder
    lock: FolderLock | None = None

    def check(self) -> None:
        """Raise LockstepError if another job is known to have taken over the folder. Cheap."""
        if self.lock:
            self.lock.check()

    def confirm(self) -> None:
        """Ask the file system whether this job holds the folder; call it before renaming or removing anything there."""
        if self.lock:
            self.lock.confirm()


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
                lock = hold_folder(path, describe_owner(world.rank_info, os.environ), LOCKED_HINT)
            except LockstepError as error:
                failure = [type(error).__name__, str(error)]
            except OSError as error:
                reason = f"cannot be written: {error}; choose another with --run-dir"
                failure = [ConfigError.__name__, f"run folder {printable_name(str(path))} {reason}"]
        text, kind, problem = world.from_main([str(path), *failure])
        if kind:
            kinds = {each.__name__: each for each in (CheckpointError, ConfigError)}
            raise kinds.get(kind, LockstepError)(problem)
        yield HeldRun(RunFolder(Path(text)), lock)
    finally:
        if lock:
            lock.close()
        for each in reversed(made):  # if the run ended before writing anything
            with suppress(OSError):
                each.rmdir()


def describe_owner(rank_info: RankInfo, environment: Mapping[str, str]) -> Owner:
    """Return this process as the owner of a lock, with its batch job and its number among restarts or requeues."""
    series = {}
    if rank_info.snapshots is not None:
        series[f"starts of {rank_info.snapshots.name}"] = rank_info.restart
    if job := environment.get("SLURM_JOB_ID"):
        runs = environment.get("SLURM_RESTART_COUNT", "0")
        series[f"Slurm job {job} of {environment.get('SLURM_CLUSTER_NAME', '')}"] = int(runs) if runs.isdecimal() else 0
    jobs = (f"{system} job {environment[name]}" for system, name in BATCH_JOBS if environment.get(name))
    return Owner("lockstep train", next(jobs, ""), series)


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
        for folder in [folder for folder in (*reversed(path.parents), path) if not folder.exists()]:
            with suppress(FileExistsError):  # another job created it
                folder.mkdir()
                made.append(folder)
        if given or made[-1:] == [path]:  # a generated name belongs to the job that created it
            return path
