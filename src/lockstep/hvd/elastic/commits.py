"""Commits that outlive the workers: every host keeps the newest in its memory, for workers that are started anew.

Where a launcher starts all workers anew after a failure (`Place.snapshots`; not the one-machine driver of elastic jobs,
whose survivors hold the state), one worker a host writes each commit to the host's folder, whole or not at all. The
workers of the next start take the newest that any host has: a lost host takes its own copy with it.

A commit is a pickle, as it may hold any object. So one is read from the job's own folder only: folder and file must be
this user's, and nobody else's to write to.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import stat
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import cloudpickle
import torch
from torch.serialization import default_restore_location

from lockstep.hvd.elastic.base import Commits, State
from lockstep.hvd.engine import current as horovod
from lockstep.hvd.ops.broadcast import broadcast_
from lockstep.hvd.ops.functions import allgather_object
from lockstep.world.launcher_environment import Place

NONE = 0  # the first commit is number 1
NAME = re.compile(r"commit-(?P<run>\d+)-(?P<number>\d+)-(?P<sum>[0-9a-f]{8})")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


def open_commits(run: int) -> Commits:
    """The commits of this job's `run`-th call of an elastic function, counted from 0 in each worker."""
    context = horovod.context
    if context is None or context.place.snapshots is None or context.place.size != context.launched:
        return Commits()
    folder = context.place.snapshots
    if not _is_private_folder(folder):
        log.warning("commits are not kept beyond the workers: %s is no folder of this user alone", folder)
        return Commits()
    return HostCommits(folder, run, context.place)


@dataclass(frozen=True)
class Kept:
    """A commit that this host has: its number, and its content as uint8."""

    number: int
    content: torch.Tensor


class HostCommits(Commits):
    """The newest commit of one elastic function, in a folder in this host's memory."""

    def __init__(self, folder: Path, run: int, place: Place) -> None:
        self._folder = folder
        self._run = run
        self._rank = place.rank
        self._writes = place.local_rank == 0
        self._number = NONE
        self._looks_back = place.restart > 0
        self._gave_up = False
        self._asked = _note_requests()

    def keep(self, state: State) -> None:
        """Where there is no room for it, or the state does not say what it has saved, that is said once."""
        self._number += 1
        if not self._writes or self._gave_up:
            return
        try:
            self._write(state.get_saved())
        except (OSError, NotImplementedError) as error:
            self._gave_up = True
            log.warning("commits are no longer kept beyond the workers of this host: %s", error)

    def bring_back(self, state: State) -> bool:
        """Take over the newest commit of any host, once, in workers that were started anew; and agree on the count.

        Raises:
            HorovodInternalError: Another worker was lost; to be called again.
        """
        own = self._newest() if self._looks_back and self._writes else None
        told = allgather_object((self._looks_back, own.number if own else NONE, len(own.content) if own else 0))
        looking, numbers, sizes = zip(*told, strict=True)
        newest = max(numbers)
        if any(looking) and newest != NONE:
            holder = numbers.index(newest)
            content = own.content if own and own.number == newest else torch.empty(sizes[holder], dtype=torch.uint8)
            content = broadcast_(content, holder)
            state.set_saved(_unpacked(content))
            state.restore()
            say = log.warning if self._rank == 0 else log.info
            say("back to commit %d, which worker %d has found on its host", newest, holder)
        self._looks_back = False
        self._number = max(allgather_object(max(self._number, newest)))
        return bool(newest != NONE)

    def must_stop(self) -> bool:
        return self._asked.is_set()

    def _write(self, saved: Any) -> None:
        """Write a commit under another name, and let the ones before make way when it is whole."""
        partial = self._folder / f"partial-{self._run}"
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                target = _Summing(file)
                torch.save(saved, cast("IO[bytes]", target), pickle_module=cloudpickle)
            path = self._folder / f"commit-{self._run}-{self._number}-{target.sum:08x}"
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for other, _ in self._found():
            if other != path:
                other.unlink(missing_ok=True)

    def _newest(self) -> Kept | None:
        """The newest sound commit here."""
        for path, match in sorted(self._found(), key=lambda found: -int(found[1]["number"])):
            with suppress(OSError):
                content = _read_private(path)
                if zlib.crc32(content) == int(match["sum"], 16):
                    return Kept(int(match["number"]), torch.frombuffer(content, dtype=torch.uint8))
            log.warning("%s is damaged, or others can write to it: it is not used", path)
        return None

    def _found(self) -> list[tuple[Path, re.Match[str]]]:
        """The commits of this function in the folder, sound or not."""
        with suppress(OSError):
            matches = [(path, NAME.fullmatch(path.name)) for path in self._folder.iterdir()]
            return [(path, match) for path, match in matches if match and int(match["run"]) == self._run]
        return []


class _Summing:
    """A file to write to that sums up what goes through it."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.sum = 0  # CRC-32: against damage alone, and a third of SHA-256's time, for which the training waits

    def write(self, part: Any) -> int:
        self.sum = zlib.crc32(part, self.sum)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()


def _unpacked(content: torch.Tensor) -> Any:
    """What was saved; a tensor that was on some GPU comes to this worker's."""
    # weights_only cannot be: a commit holds any object. The content is a file that has passed _read_private, or was
    # sent by the worker of this job that has read it.
    return torch.load(
        io.BytesIO(content.numpy().tobytes()),
        map_location=lambda storage, location: default_restore_location(storage, location.partition(":")[0]),
        weights_only=False,
    )


def _is_private_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE


def _read_private(path: Path) -> bytearray:
    """The content of a file.

    Raises:
        PermissionError: It is not this user's, others can write to it, or it is no plain file.
        OSError: It cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} is no file of this user alone")
        content = bytearray(status.st_size)
        read = file.readinto(content)
    return content[:read]


def _note_requests() -> threading.Event:
    """Set by SIGUSR1 from now on, by which the launcher asks the workers to end; not where the script listens to it."""
    asked = threading.Event()
    with suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, lambda number, frame: asked.set())
    return asked
