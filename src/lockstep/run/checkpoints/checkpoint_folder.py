"""The checkpoints of a run: one folder per step, written atomically; the newest few and the best are kept.

A background thread writes `checkpoints/step-00000120/` under a temporary name, syncs and renames it; see
`checkpoint_format` for the files. `checkpoints/best` links to the best by top-1. A full or missing disk does not stop
training: the failure is reported, and the next checkpoint tries again.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lockstep.config.run_paths import MANIFEST_FILE, PREFIX, all_in, name_of
from lockstep.config.run_paths import complete as complete
from lockstep.config.run_paths import newest as newest
from lockstep.config.run_paths import step_of as step_of
from lockstep.errors import CheckpointError
from lockstep.files.atomic import PARTIAL, partial_of, sync
from lockstep.run.checkpoints import checkpoint_format
from lockstep.run.checkpoints.checkpoint_format import MODEL_FILE
from lockstep.run.checkpoints.sharded import WriteBarrier, file_of
from lockstep.run.checkpoints.snapshot import Snapshot, Tensors
from lockstep.world.peer_loss import defer_exit

NICE = 10  # a tenth of a busy core; 19 would be a seventieth, so that 0.3 s of work would take 20 s


def _lower_priority() -> None:
    """Lower the priority of this thread, if the system allows it."""
    if sys.platform == "linux":  # elsewhere, the priority is that of the process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


SPARE_BYTES = 4 << 20  # free space required besides the tensors, for other files, records and logs


class Checkpoints:
    """Writes nothing: for workers whose state another worker saves."""

    stores_whole = False
    """Whether this worker writes what is not sharded over the workers."""
    _warn: Callable[[str], None] = logging.getLogger("lockstep").warning
    _writing: Callable[[], AbstractContextManager[None]] = nullcontext

    def report_to(self, warn: Callable[[str], None], writing: Callable[[], AbstractContextManager[None]]) -> None:
        """Report failed writes to `warn`, from any thread; enter `writing` around each write."""
        self._warn, self._writing = warn, writing

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Write a checkpoint of the snapshot that `take` returns; it must not be modified afterwards."""

    def wait(self) -> None:
        """Wait until the last saved checkpoint is written."""

    def forget_after(self, step: int, best_step: int) -> None:
        """Remove checkpoints of steps after `step`, which a resumed run repeats, and set the best one.

        Raises:
            CheckpointError: The folder cannot be written.
        """

    def best_progress(self) -> Mapping[str, Any]:
        """Return the progress that the best checkpoint has stored; empty if there is none."""
        return {}

    def export_best(self, path: Path) -> int:
        """Export the best checkpoint's weights as one file. Return its step, or -1 if nothing is written."""
        return -1

    def close(self) -> None:
        """Wait for the background write to finish."""


class BackgroundWriter(Checkpoints):
    """Writes on a thread, one checkpoint after the other.

    Args:
        durable: Sync each file to disk; False: for folders in memory.
        barrier: If the state is sharded over the workers, which all write into the folder.
    """

    def __init__(self, folder: Path, durable: bool, barrier: WriteBarrier | None):
        self.folder = folder
        self._durable = durable
        self._barrier = barrier
        self._token = barrier.token if barrier else secrets.token_hex(4)  # keeps the partial files of two jobs apart
        self._saves = 0
        self._write_in_background: Future[None] | None = None

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Take a snapshot, and write it in the background. Waits for the previous write first."""
        self._wait()
        self._saves += 1
        if self._barrier:
            self._barrier.take_time()
        writer = ThreadPoolExecutor(1, "checkpoint", _lower_priority)  # the interpreter waits for its thread at exit
        self._write_in_background = writer.submit(self._save, take(), is_best)
        writer.shutdown(wait=False)

    def wait(self) -> None:
        self._wait()

    def close(self) -> None:
        if self._barrier:
            self._barrier.hurry()
        self._wait()

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        raise NotImplementedError

    def _partial_of(self, name: str) -> Path:
        return partial_of(self.folder / f"{self._token}-{name}")

    def _partial_checkpoint(self, snapshot: Snapshot) -> Path:
        return self._partial_of(f"{self._saves}-{name_of(snapshot.step)}")

    def _wait(self) -> None:
        """Wait until the last write ends, and raise its exception, if any."""
        writing = self._write_in_background
        if writing is not None:
            futures.wait([writing])  # Ctrl-C may interrupt it; the next call must wait again
            self._write_in_background = None
            writing.result()


class ShardWriter(BackgroundWriter):
    """Writes the parts of a worker other than rank 0, which completes the checkpoint."""

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        assert self._barrier is not None
        path = self._partial_checkpoint(snapshot) / file_of(self._barrier.rank)
        snapshot.wait()
        problem, description = "", None
        with self._writing(), defer_exit():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                description = checkpoint_format.write_own_shards(path, snapshot, self._durable)
            except OSError as error:
                problem = _describe(error, path)
            except BaseException as error:
                problem = repr(error)
                raise
            finally:
                self._barrier.post(self._saves, description, problem)


class CheckpointFolder(BackgroundWriter):
    """The checkpoints of one run; the newest `keep` and the best are kept.

    A failed write is reported and skipped; a best checkpoint then stays in memory until it can be written (not if the
    state is sharded).

    Args:
        durable: Sync each checkpoint to disk before renaming it; False: for folders in memory.
        confirm: Called before anything is renamed or removed; raises LockstepError if another job took over the folder.
        barrier: If the state is sharded over the workers, which all write into the folder.
    """

    noun = "checkpoint"
    stores_whole = True

    def __init__(
        self,
        folder: Path,
        keep: int,
        durable: bool = True,
        confirm: Callable[[], None] = lambda: None,
        barrier: WriteBarrier | None = None,
    ):
        super().__init__(folder, durable, barrier)
        self._confirm = confirm
        self._keep = keep
        self._failure = ""  # of the last save
        self._unwritten_best: Snapshot | None = None

    def wait(self) -> None:
        """Wait until the last saved checkpoint is written.

        Raises:
            CheckpointError: It could not be written; earlier checkpoints are unchanged.
        """
        self._wait()
        if self._failure:
            raise CheckpointError(self._failure)

    def forget_after(self, step: int, best_step: int) -> None:
        self._confirm()
        try:
            for path in all_in(self.folder):
                if step_of(path) > step:
                    self._remove(path)
            best = self.folder / name_of(best_step)
            if best.is_dir():
                self._point_best_at(best)
            elif not (self.folder / "best").is_dir():  # else, the later best was not written
                (self.folder / "best").unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be written: {error.strerror or error}; fix that, or choose another folder "
                f"(--run-dir)"
            ) from None

    def best_progress(self) -> Mapping[str, Any]:
        with suppress(CheckpointError):
            return checkpoint_format.read_entry(self.folder / "best", "progress")
        return {}

    def export_best(self, path: Path) -> int:
        """Export the best checkpoint's weights, or their moving average if there is one. Return its step.

        Raises:
            CheckpointError: The weights cannot be read or written.
        """
        self._wait()
        best = checkpoint_format.load(best_or_newest(self.folder))
        self._confirm()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint_format.export(path, best.usable, best.about)
        except OSError as error:
            raise CheckpointError(
                f"{path} (the best weights) was not written: {error.strerror or error}; free disk space, then run "
                f"`lockstep export {best_or_newest(self.folder)}`"
            ) from error
        return best.step

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        """Write this snapshot, and a best one that failed to be written before."""
        snapshot.wait()
        with self._writing(), defer_exit():
            self._failure = self._try(snapshot, is_best)
        if is_best:
            self._unwritten_best = snapshot if self._failure and not self._barrier else None
        elif self._unwritten_best is not None:
            best = self._try(self._unwritten_best, is_best=True)
            self._failure = "; ".join(filter(None, (self._failure, best)))
            self._unwritten_best = self._unwritten_best if best else None
        if self._failure:
            self._report(f"{self._failure}; training continues")

    def _report(self, line: str) -> None:
        self._warn(line)

    def _try(self, snapshot: Snapshot, is_best: bool) -> str:
        """Write a checkpoint. Return the problem, or "" on success."""
        try:
            problem = self._lack_of_room(snapshot)
            if not problem:
                try:
                    self._write(snapshot, is_best)
                except FileNotFoundError:  # the folder was removed while writing
                    if self._barrier:
                        raise
                    self._write(snapshot, is_best)
        except OSError as error:
            problem = _describe(error, self.folder)
        if not problem:
            return ""
        with suppress(OSError):
            if self._barrier:  # `_clear_partial` leaves the folders of this job
                self._barrier.settle(self._saves)
                shutil.rmtree(self._partial_checkpoint(snapshot), ignore_errors=True)
            self._clear_partial()
        last = newest(self.folder)
        which = f"the newest is step {step_of(last):,}" if last else f"{self.folder} has none yet"
        return f"{self.noun} of step {snapshot.step:,} was not written: {problem}; {which}"

    def _lack_of_room(self, snapshot: Snapshot) -> str:
        """Return a message if the disk space is not sufficient, else ""."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        needed, free = snapshot.size_bytes + SPARE_BYTES, shutil.disk_usage(there).free
        return f"needs {needed / 1e6:,.1f} MB, but {there} has {free / 1e6:,.1f} MB free" if free < needed else ""

    def _write(self, snapshot: Snapshot, is_best: bool) -> None:
        target = self.folder / name_of(snapshot.step)
        partial = self._partial_checkpoint(snapshot)
        self._confirm()
        self._make(self.folder)
        self._clear_partial()
        partial.mkdir(exist_ok=self._barrier is not None)
        barrier = self._barrier
        others = functools.partial(barrier.wait, self._saves, partial) if barrier else None
        checkpoint_format.write(partial, snapshot, self._durable, others)
        self._confirm()
        # A resumed run may repeat a saved step; between the two renames that checkpoint does not exist.
        before = self._set_aside(target) if target.exists() else None
        os.rename(partial, target)
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)
        self._sync(self.folder)
        if is_best:
            self._point_best_at(target)
        self._drop_old()
        self._sync(self.folder)

    def _drop_old(self) -> None:
        best = os.path.realpath(self.folder / "best")
        for path in complete(self.folder)[: -self._keep]:
            if os.path.realpath(path) != best:
                self._remove(path)

    def _make(self, folder: Path) -> None:
        """Create a folder and its parents, and sync their names to disk."""
        if folder.is_dir():
            return
        self._make(folder.absolute().parent)
        folder.mkdir(exist_ok=True)
        self._sync(folder.absolute().parent)

    def _clear_partial(self) -> None:
        """Remove partial files that a killed run or a full disk left behind."""
        others = self._partial_of("").name if self._barrier else None  # they may be writing already
        for path in self.folder.glob(f"{PARTIAL}*"):
            if others and path.name.startswith(others):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _point_best_at(self, target: Path) -> None:
        link = self._partial_of("best")
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        best = self.folder / "best"
        if best.is_dir() and not best.is_symlink():  # as after copying a run with links followed
            self._remove(best)
        os.replace(link, best)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(self._set_aside(path), ignore_errors=True)

    def _set_aside(self, path: Path) -> Path:
        """Rename a checkpoint before its removal, so that it is never found half-removed."""
        doomed = self._partial_of(f"old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        return doomed

    def _sync(self, folder: Path) -> None:
        if self._durable:
            sync(folder)


def _describe(error: OSError, place: Path) -> str:
    return f"{error.strerror or error} ({error.filename or place})"


def newest_sound(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint in a folder, and lines on newer, damaged ones.

    Raises:
        CheckpointError: All checkpoints are damaged; the message names them.
    """
    problems: list[str] = []
    for path in reversed(all_in(folder)):
        try:
            checkpoint_format.verify(path)
        except CheckpointError as error:
            problems.append(str(error).partition(";")[0])
        else:
            return path, [f"{problem}; resuming from {path}" for problem in problems]
    if problems:
        raise CheckpointError(f"all checkpoints in {folder} are damaged: {'; '.join(problems)}")
    return None, []


def best_or_newest(folder: Path) -> Path:
    """Return the best checkpoint in a `checkpoints` folder, or the newest if there is no best, as after a resume.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    best = folder / "best"
    return best if (best / MANIFEST_FILE).is_file() else locate(folder)


def locate(path: Path) -> Path:
    """Return the path if it is a checkpoint, or the newest checkpoint of a run folder.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    if names_one(path):
        return path
    found = newest(path / "checkpoints") or newest(path)
    if found is None:
        raise CheckpointError(
            f"{path} is not a checkpoint and contains none; name a run folder or one of its checkpoints/{PREFIX}... "
            f"folders"
        )
    return found


def names_one(path: Path) -> bool:
    """Return whether a path is the folder of one checkpoint."""
    return (path / MANIFEST_FILE).is_file()


def run_folder_of(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint."""
    return checkpoint.resolve().parent.parent


def load_model(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Load weights and their metadata from an exported file, a checkpoint or a run folder.

    For a run folder this is the exported model, or else the newest checkpoint. For a checkpoint with a moving average
    of the weights, it is the average.

    Raises:
        CheckpointError: The file or checkpoint is missing or damaged.
    """
    if path.is_dir() and (path / MODEL_FILE).is_file() and not names_one(path):
        path = path / MODEL_FILE
    if path.is_dir() or not path.exists():
        snapshot = checkpoint_format.load(locate(path))
        return snapshot.usable, dict(snapshot.about)
    return checkpoint_format.read_exported(path)
