"""One writer per folder, across hosts: a lock file with a heartbeat.

`.lock` names the process that holds the folder, and a thread of that process touches it every few seconds. The lock of
a process that exited is taken over. On the holder's own machine, its pid and start time show whether it exited. On
other machines, it is considered dead when its heartbeat stops, or when this job succeeds the holder's (a restart or
requeue). A suspended holder may lose the folder, so it confirms its lock before it renames anything there. If it lost
the folder, the new holder's lock is kept on exit, marked as released, so that the suspended one does not take it back.

Processes take turns to read and replace the lock: they create another file with O_EXCL, which every shared file system
supports.
POSIX locks are not used: NFS mounts and Lustre may not support them, or only within one host.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import ConfigError, LockstepError
from lockstep.files.atomic import PARTIAL, partial_of, replacing
from lockstep.files.output import say
from lockstep.files.untrusted import open_plain, parse_json, printable

LOCK_FILE = ".lock"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0  # 12 beats: no job loses its folder to a file server that hangs for less
WATCH_SECONDS = 15.0  # three beats
POLL_SECONDS = 0.5
TURN_SECONDS = 0.01
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Owner:
    """The process that holds or requests a folder.

    Args:
        purpose: The command, such as "lockstep train".
        job: Its batch job, for messages; "" if none.
        series: Its position in each sequence of processes that run one after another, by name: the restarts of a job's
            workers, or the runs of a requeued batch job.
        machine: Boot id and pid namespace, within which `pid` and `started` identify a process.
        started: Start time of the process, on a monotonic clock.
        since: When it took the folder, as Unix time.
        succeeds: Whether it took the folder from a process that may still run.
        released: Whether it has released the folder.
    """

    purpose: str
    job: str = ""
    series: Mapping[str, int] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    machine: str = field(default_factory=lambda: _machine())
    started: float = field(default_factory=lambda: _started(os.getpid()) or 0.0)
    uid: int = field(default_factory=os.getuid)
    since: float = field(default_factory=time.time)
    succeeds: bool = False
    released: bool = False

    def follows(self, other: Owner) -> bool:
        """Return whether `other` must have exited because this process started."""
        return any(number > other.series.get(name, number) for name, number in self.series.items())

    @property
    def is_here(self) -> bool:
        """Whether this process can check if the owner is running; other users' processes may be hidden."""
        return self.machine == _machine() and (self.uid == os.getuid() or _started(self.pid) is not None)

    @property
    def is_stale(self) -> bool:
        """Whether this owner is known to no longer hold the folder."""
        return self.released or (self.is_here and _started(self.pid) != self.started)

    def write(self, path: Path) -> bytes:
        """Replace a lock file, and return its content."""
        content = json.dumps(asdict(self)).encode()
        with replacing(path) as partial:
            partial.write_bytes(content)
        return content

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.purpose}{job}, process {self.pid} on {self.host}, since {since}"


class FolderLock:
    """A folder held by this process until `close`. Created by `hold_folder`, which checks that it is free."""

    def __init__(self, folder: Path, owner: Owner):
        self.folder = folder
        self._owner = owner
        self._path = folder / LOCK_FILE
        self._content = owner.write(self._path)
        self._lost_to = ""
        self._confirmed = time.monotonic()
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the folder is known to be lost. Reads the lock file only if this process was suspended.

        Raises:
            LockstepError: Another process took over the folder.
        """
        is_late = time.monotonic() - self._confirmed > 2 * BEAT_SECONDS
        if self._lost_to or (is_late and not self._mutex.locked()):  # locked: the heartbeat waits for the file server
            self.confirm()

    def confirm(self) -> None:
        """Read the lock file and raise unless this process still holds the folder.

        Raises:
            LockstepError: Another process took over the folder.
        """
        with self._mutex:
            self._lost_to = self._lost_to or self._new_holder()
        if self._lost_to:
            raise LockstepError(
                f"{self.folder} is now held by {self._lost_to}; this process (pid {os.getpid()} on "
                f"{socket.gethostname()}) was suspended or disconnected for too long and exits without writing to it"
            )

    def close(self) -> None:
        """Release the folder."""
        self._closing.set()
        try:
            self._thread.join()
        finally:
            with suppress(OSError):
                content, _ = _read(self._path)
                if content == self._content and self._owner.succeeds:
                    replace(self._owner, released=True).write(self._path)
                elif content == self._content:
                    self._path.unlink()

    def _new_holder(self) -> str:
        """Read the lock file and return the process that took the folder over; "" if none is known."""
        try:
            content, _ = _read(self._path)
        except FileNotFoundError:  # removed manually, or the folder was renamed and created again
            with suppress(OSError), _turn(self.folder):
                if not self._path.exists():  # otherwise the next check names the process that was faster
                    self._owner.write(self._path)
            return ""
        except PermissionError:
            return "another user's process"
        except OSError:
            return ""  # the file system is unavailable, for writes too
        if content != self._content:
            return str(_parse(content))
        self._confirmed = time.monotonic()
        return ""

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            try:
                self.confirm()
                os.utime(self._path)
            except LockstepError:
                return
            except OSError:
                continue


def hold_folder(folder: Path, owner: Owner, fix: str) -> FolderLock:
    """Lock an existing folder against all other writers; wait while the last holder may still be running.

    Args:
        fix: What the user can do if the folder is in use, for the error message.

    Raises:
        ConfigError: Another process holds the folder.
        OSError: The lock cannot be written.
    """
    watched, since = None, time.monotonic()
    while True:
        with _turn(folder) as now:
            try:
                lock = content, touched = _read(folder / LOCK_FILE)
            except FileNotFoundError:
                return FolderLock(folder, owner)
            holder = _parse(content)
            successor = replace(owner, succeeds=holder.succeeds or not holder.is_here)
            if holder.is_stale or owner.follows(holder):
                return FolderLock(folder, successor)
            if holder.is_here or (watched or lock) != lock:
                raise ConfigError(f"{folder} is in use by {holder}; {fix}")
            silent_seconds = time.monotonic() - since
            if silent_seconds >= WATCH_SECONDS:  # not at once: some file systems use the host's clock
                silent_seconds = max(silent_seconds, now - touched)
            if silent_seconds > SILENT_SECONDS:
                say(f"lockstep: took over {folder} from {holder}, which was silent for {silent_seconds:,.0f} s")
                return FolderLock(folder, successor)
        if watched is None:
            limit = f"waiting up to {SILENT_SECONDS:g} s to see if it is still running"
            say(f"lockstep: {folder} was in use by {holder}; {limit}")
        watched = lock
        time.sleep(POLL_SECONDS)


def holding(folder: Path, purpose: str) -> closing[FolderLock]:
    """Lock an existing folder while a block runs.

    Raises:
        ConfigError: Another process holds the folder.
        OSError: The lock cannot be written.
    """
    return closing(hold_folder(folder, Owner(purpose), "wait for it to exit, or choose another folder"))


def holder_of(folder: Path) -> Owner | None:
    """Return the process that holds the folder; None if no process does. On another machine it may have exited."""
    with suppress(OSError):
        holder = _parse(_read(folder / LOCK_FILE)[0])
        return None if holder.is_stale else holder
    return None


def is_of_lock(path: Path) -> bool:
    """Return whether a file is a lock, or a temporary file of a process that was killed while locking."""
    return path.name.removeprefix(PARTIAL).startswith(LOCK_FILE)


@contextmanager
def _turn(folder: Path) -> Iterator[float]:
    """Keep other processes from replacing the folder's lock in the block; yield the time of the file server's clock."""
    path = partial_of(folder / f"{LOCK_FILE}-turn")
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                if abs(time.time() - path.stat().st_mtime) > SILENT_SECONDS:  # its process was killed at this point
                    path.unlink()
            time.sleep(TURN_SECONDS)
    try:
        with os.fdopen(descriptor):
            now = os.fstat(descriptor).st_mtime
        yield now
    finally:
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[bytes, float]:
    """Return a lock file's content and modification time on the file server's clock.

    Opening the file makes NFS revalidate both.
    """
    try:
        with open_plain(path) as file:
            return file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime
    except ValueError as error:
        raise OSError(f"{path} is not a regular file; remove it") from error


def _parse(content: bytes) -> Owner:
    """Return the owner that a lock file names; an unknown one if the file is damaged."""
    try:
        value: Any = parse_json(content)
        fields: dict[str, Any] = {name: printable(str(value[name])) for name in ("purpose", "job", "host", "machine")}
        fields |= {name: float(value[name]) for name in ("started", "since")}
        fields |= {name: value.get(name) is True for name in ("succeeds", "released")}
        fields["series"] = {str(name): int(number) for name, number in value["series"].items()}
        owner = Owner(**fields, pid=int(value["pid"]), uid=int(value["uid"]))
        str(owner)  # its time may be out of range
        return owner
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return Owner("an unknown process", "", {}, "an unknown host", 0, machine="", started=0.0, uid=-1, since=0.0)


def _machine() -> str:
    """Return an id of this boot and of this process's pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def _started(pid: int) -> float | None:
    """Return the start time of a local process, on a monotonic clock; None if it has exited."""
    try:
        if sys.platform != "linux":
            return psutil.Process(pid).create_time()
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else float(fields[18])
    except (OSError, psutil.Error):
        return None
