"""The checkpoints of a run: one folder a step, whole or not there; the newest few and the best.

`checkpoints/step-00000120/` is written under another name by a thread in the background, synced and renamed (its files:
`checkpoint_format`). `checkpoints/best` is a link to the best by top-1. A disk that is full, or gone for a while, ends
no training: what cannot be written is told, and the next checkpoint tries again.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.files.atomic import PARTIAL, partial_of, sync
from lockstep.files.checkpoint_listing import MANIFEST_FILE, PREFIX, all_in, name_of
from lockstep.files.checkpoint_listing import complete as complete
from lockstep.files.checkpoint_listing import newest as newest
from lockstep.files.checkpoint_listing import step_of as step_of
from lockstep.train.checkpoints import checkpoint_format
from lockstep.train.checkpoints.background_writer import BackgroundWriter
from lockstep.train.checkpoints.checkpoint_format import MODEL_FILE
from lockstep.train.checkpoints.snapshot import Snapshot, Tensors
from lockstep.train.progress import Progress
from lockstep.world.peer_loss import unbroken
from lockstep.world.world import World

SPARE_BYTES = 4 << 20  # to be free beside a checkpoint's tensors: its other files, and room for records and logs


class Checkpoints:
    """What a worker does that writes no checkpoints, because another has everything that it has: nothing."""

    def report_to(self, tell: Callable[[str], None], writing: Callable[[], AbstractContextManager[None]]) -> None:
        """Tell there, from any thread, what cannot be written meanwhile; `writing` surrounds each write."""

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Write a checkpoint of what `take` returns, which nothing may change any more."""

    def wait(self) -> None:
        """Return when what was saved last is written."""

    def forget_after(self, step: int, best_step: int) -> None:
        """Drop the checkpoints of later steps, which a run resumed from `step` takes again, and set the best.

        Raises:
            CheckpointError: The folder cannot be written.
        """

    @property
    def has_best(self) -> bool:
        """Whether there is a best one."""
        return False

    def export_best(self, path: Path) -> int:
        """Write the best checkpoint's weights for use, as one file; return its step, -1 where nothing is written."""
        return -1

    def close(self) -> None:
        """End what runs in the background, when it is done."""


class CheckpointFolder(Checkpoints):
    """The checkpoints of one run; the newest `keep` and the best are kept.

    Args:
        durable: Have each on the disk before it counts; False: for a folder that is in memory anyway.
        confirm: Called before anything is renamed or removed; raises LockstepError where another job has taken over.
    """

    noun = "checkpoint"

    def __init__(self, folder: Path, keep: int, durable: bool = True, confirm: Callable[[], None] = lambda: None):
        self.folder = folder
        self._confirm = confirm
        self._token = secrets.token_hex(4)  # so that no two writers share what is half-written
        self._keep = keep
        self._durable = durable
        self._tell: Callable[[str], None] = logging.getLogger("lockstep").warning
        self._writing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._writer = BackgroundWriter()
        self._failure = ""  # of what was saved last
        self._unwritten_best: Snapshot | None = None

    def report_to(self, tell: Callable[[str], None], writing: Callable[[], AbstractContextManager[None]]) -> None:
        self._tell, self._writing = tell, writing

    def save(self, take: Callable[[], Snapshot], is_best: bool = False) -> None:
        """Take a snapshot and return; it is written in the background, and those no longer kept are removed.

        While one is being written, the next has to wait. What the disk does not take is told and left out; a best one
        is kept in memory then, and written when there is room.
        """
        self._writer.wait()
        snapshot = take()
        self._writer.start(lambda: self._save(snapshot, is_best))

    def wait(self) -> None:
        """Return when what was saved last is written.

        Raises:
            CheckpointError: It could not be; the ones that were there still are.
        """
        self._writer.wait()
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
            elif not _is_copy(self.folder / "best"):
                (self.folder / "best").unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be written: {error.strerror or error}; fix that, or choose another --run-dir"
            ) from None

    @property
    def has_best(self) -> bool:
        return (self.folder / "best").is_dir()

    def export_best(self, path: Path) -> int:
        """Write the best checkpoint's weights, or their moving average where one was kept, and return its step.

        Raises:
            CheckpointError: They cannot be read or written.
        """
        self._writer.wait()
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

    def close(self) -> None:
        self._writer.wait()

    def _save(self, snapshot: Snapshot, is_best: bool) -> None:
        """Write this one, and the best one that there was no room for before."""
        snapshot.wait()
        with self._writing(), unbroken():
            self._failure = self._try(snapshot, is_best)
        if is_best:
            self._unwritten_best = snapshot if self._failure else None
        elif self._unwritten_best is not None:
            best = self._try(self._unwritten_best, is_best=True)
            self._failure = "; ".join(filter(None, (self._failure, best)))
            self._unwritten_best = self._unwritten_best if best else None
        if self._failure:
            self._tell(f"{self._failure}; training continues")

    def _try(self, snapshot: Snapshot, is_best: bool) -> str:
        """Write a checkpoint; returns why that cannot be, or nothing."""
        try:
            problem = self._lack_of_room(snapshot)
            if not problem:
                try:
                    self._write(snapshot, is_best)
                except FileNotFoundError:  # someone has removed the folder meanwhile
                    self._write(snapshot, is_best)
        except OSError as error:
            problem = f"{error.strerror or error} ({error.filename or self.folder})"
        if not problem:
            return ""
        with suppress(OSError):
            self._clear_partial()
        last = newest(self.folder)
        which = f"the newest is step {step_of(last):,}" if last else f"{self.folder} has none yet"
        return f"{self.noun} of step {snapshot.step:,} was not written: {problem}; {which}"

    def _lack_of_room(self, snapshot: Snapshot) -> str:
        """What is missing on the disk for it, or nothing."""
        there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.is_dir())
        needed, free = snapshot.size_bytes + SPARE_BYTES, shutil.disk_usage(there).free
        return f"needs {_megabytes(needed)}, but {there} has {_megabytes(free)} free" if free < needed else ""

    def _write(self, snapshot: Snapshot, is_best: bool) -> None:
        target = self.folder / name_of(snapshot.step)
        partial = self._partial_of(target.name)
        self._confirm()
        self._make(self.folder)
        self._clear_partial()
        partial.mkdir()
        checkpoint_format.write(partial, snapshot, self._durable)
        self._confirm()
        # A resumed run may take a step again that it had saved before: without the one for two system calls.
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
        """Make a folder with those above it, so that their names survive a power failure."""
        if folder.is_dir():
            return
        self._make(folder.absolute().parent)
        folder.mkdir(exist_ok=True)
        self._sync(folder.absolute().parent)

    def _clear_partial(self) -> None:
        """Remove what a killed run, or a full disk, has left half-written."""
        for path in self.folder.glob(f"{PARTIAL}*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _point_best_at(self, target: Path) -> None:
        link = self._partial_of("best")
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        if _is_copy(self.folder / "best"):
            self._remove(self.folder / "best")
        os.replace(link, self.folder / "best")

    def _remove(self, path: Path) -> None:
        shutil.rmtree(self._set_aside(path), ignore_errors=True)

    def _set_aside(self, path: Path) -> Path:
        """Give a checkpoint another name, so that no half-removed one is ever taken for one."""
        doomed = self._partial_of(f"old-{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        return doomed

    def _partial_of(self, name: str) -> Path:
        return partial_of(self.folder / f"{self._token}-{name}")

    def _sync(self, folder: Path) -> None:
        if self._durable:
            sync(folder)


def go_back(checkpoints: Checkpoints, progress: Progress, world: World) -> None:
    """Drop what lies after the progress that training goes on from. Call it on all workers, `checkpoints` being own.

    Where its best checkpoint is not there, lost with one that is damaged, it forgets that there was one.
    """
    checkpoints.forget_after(progress.step, progress.best_step)
    if not world.from_main(checkpoints.has_best):
        progress.forget_best()


def _is_copy(best: Path) -> bool:
    """Whether the best checkpoint is a folder of its own, as where a run was copied with its links followed."""
    return best.is_dir() and not best.is_symlink()


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def newest_sound(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in a folder whose files are as they were written, and what is wrong with newer ones.

    Raises:
        CheckpointError: There are some, but all are damaged; the message names them.
    """
    problems: list[str] = []
    for path in reversed(all_in(folder)):
        try:
            checkpoint_format.verify(path)
        except CheckpointError as error:
            problems.append(str(error).partition(";")[0])
        else:
            return path, problems
    if problems:
        raise CheckpointError(f"all checkpoints in {folder} are damaged: {'; '.join(problems)}")
    return None, []


def best_or_newest(folder: Path) -> Path:
    """The best checkpoint in a `checkpoints` folder; a resumed run in a new folder may have none but the newest.

    Raises:
        CheckpointError: There is none at all.
    """
    best = folder / "best"
    return best if (best / MANIFEST_FILE).is_file() else locate(folder)


def locate(path: Path) -> Path:
    """The checkpoint that a path means: a checkpoint's own folder, or the newest of a run.

    Raises:
        CheckpointError: There is none.
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
    """Whether a path is a checkpoint's own folder."""
    return (path / MANIFEST_FILE).is_file()


def run_folder_of(checkpoint: Path) -> Path:
    """The run that a checkpoint belongs to."""
    return checkpoint.resolve().parent.parent


def load_model(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Weights for use, and what they belong to, from an exported file, a checkpoint or a run folder.

    A run folder means its exported model, if there is one, else its newest checkpoint. Where a moving average was
    kept, a checkpoint means the average.

    Raises:
        CheckpointError: There is nothing of that kind, or it is damaged.
    """
    if path.is_dir() and (path / MODEL_FILE).is_file() and not names_one(path):
        path = path / MODEL_FILE
    if path.is_dir() or not path.exists():
        snapshot = checkpoint_format.load(locate(path))
        return snapshot.usable, dict(snapshot.about)
    return checkpoint_format.read_exported(path)
