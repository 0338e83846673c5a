"""Commits that outlive the workers: every host keeps the newest one in memory, for restarted workers.

If the launcher restarts all workers after a failure (`RankInfo.snapshots`), one worker per host writes each commit to
the host's folder, atomically. Restarted workers restore the newest commit of any host, so that losing a host loses no
commit. The single-host driver of elastic jobs does not need this: its surviving workers hold the state.

A commit is a pickle, since it may contain any object. So it is only read from the job's folder, and only if folder and
file are owned by this user and not writable by others.
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
from pathlib import Path
from typing import IO, Any, cast

import cloudpickle
import torch
from torch.serialization import default_restore_location

from lockstep.config.values import NOTICE
from lockstep.hvd.elastic.state import Commits, State
from lockstep.hvd.engine import context as engine
from lockstep.hvd.ops.broadcast import broadcast_
from lockstep.hvd.ops.functions import allgather_object
from lockstep.world.launcher_environment import RankInfo

NONE = 0  # the first commit is number 1
NAME = re.compile(r"commit-(?P<run>\d+)-(?P<number>\d+)-(?P<sum>[0-9a-f]{8})")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


def open_commits(run: int) -> Commits:
    """Return the storage for the commits of the `run`-th elastic function that this worker calls, from 0."""
    context = engine.current
    if context is None or context.rank_info.snapshots is None or context.rank_info.size != context.launched:
        return Commits()
    folder = context.rank_info.snapshots
    if not _is_private_folder(folder):
        log.warning("commits will not survive a restart: %s is not a folder that only this user can write to", folder)
        return Commits()
    return HostCommits(folder, run, context.rank_info)


class HostCommits(Commits):
    """Keeps the newest commit of one elastic function in a folder in this host's memory."""

    def __init__(self, folder: Path, run: int, rank_info: RankInfo) -> None:
        self._folder = folder
        self._run = run
        self._rank = rank_info.rank
        self._writes = rank_info.local_rank == 0
        self._number = NONE
        self._must_restore = rank_info.restart > 0
        self._gave_up = False
        self._stop_requested = _watch_stop_signal()

    def keep(self, state: State) -> None:
        """Write the state's saved copy. If that fails, log a warning and stop writing."""
        self._number += 1
        if not self._writes or self._gave_up:
            return
        try:
            self._write(state.get_saved())
        except (OSError, NotImplementedError) as error:
            self._gave_up = True
            log.warning("commits on this host will no longer survive a restart: %s", error)

    def restore_newest(self, state: State) -> bool:
        """Restore the newest commit of any host, once after a restart, and agree on its number.

        Raises:
            HorovodInternalError: Another worker disconnected; call this again after `init`.
        """
        own = self._newest() if self._must_restore and self._writes else None
        number, content = own or (NONE, torch.empty(0, dtype=torch.uint8, device="cpu"))
        replies = allgather_object((self._must_restore, number, len(content)))
        restarted, numbers, sizes = zip(*replies, strict=True)
        newest = max(numbers)
        if any(restarted) and newest != NONE:
            holder = numbers.index(newest)
            if number != newest:
                content = torch.empty(sizes[holder], dtype=torch.uint8, device="cpu")
            content = broadcast_(content, holder)
            state.set_saved(_unpacked(content))
            state.restore()
            level = logging.WARNING if self._rank == 0 else logging.INFO
            log.log(level, "restored commit %d, found on the host of worker %d", newest, holder)
        self._must_restore = False
        self._number = max(allgather_object(max(self._number, newest)))
        return bool(newest != NONE)

    def must_stop(self) -> bool:
        return self._stop_requested.is_set()

    def _write(self, saved: Any) -> None:
        """Write a commit to a temporary file, rename it, and delete the previous commits."""
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

    def _newest(self) -> tuple[int, torch.Tensor] | None:
        """Return the number of the newest undamaged commit on this host, and its content as uint8 [bytes]."""
        for path, match in sorted(self._found(), key=lambda found: -int(found[1]["number"])):
            with suppress(OSError):
                content = _read_private(path)
                if zlib.crc32(content) == int(match["sum"], 16):
                    return int(match["number"]), torch.frombuffer(content, dtype=torch.uint8)
            log.warning("ignoring %s: it is damaged or writable by others", path)
        return None

    def _found(self) -> list[tuple[Path, re.Match[str]]]:
        """Return this function's commits in the folder, including damaged ones."""
        with suppress(OSError):
            matches = [(path, NAME.fullmatch(path.name)) for path in self._folder.iterdir()]
            return [(path, match) for path, match in matches if match and int(match["run"]) == self._run]
        return []


class _Summing:
    """Wraps a file and computes a checksum of the bytes written to it."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self.sum = 0  # CRC-32, since training waits: detecting damage with SHA-256 takes three times as long

    def write(self, part: Any) -> int:
        self.sum = zlib.crc32(part, self.sum)
        return self._file.write(part)

    def flush(self) -> None:
        self._file.flush()


def _unpacked(content: torch.Tensor) -> Any:
    """Unpickle a saved copy, with GPU tensors on this worker's GPU."""
    # Not weights_only: a commit holds any object. The content passed _read_private on this or another worker.
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
    """Return the content of a file.

    Raises:
        PermissionError: It is not owned by this user, is writable by others, or is not a regular file.
        OSError: It cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} is not a regular file that only this user can write to")
        content = bytearray(status.st_size)
        read = file.readinto(content)
    return content[:read]


def _watch_stop_signal() -> threading.Event:
    """Return an event that is set by the signals that request a stop, except those that the script handles."""
    requested = threading.Event()
    with suppress(ValueError):  # not the main thread
        for number in NOTICE:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda number, frame: requested.set())
    return requested
