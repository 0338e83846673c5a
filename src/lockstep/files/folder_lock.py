"""One writer per folder, across hosts: a lock file with a heartbeat.

`.lock` names the process that holds the folder. It is created with O_EXCL, which every shared file system supports, and
a thread touches it every few seconds. The lock of a process that exited is taken over. On the holder's own machine, its
pid and start time show whether it exited. On other machines, it is considered dead when its heartbeat stops, or when
this job succeeds the holder's (a restart or requeue). A suspended holder may lose the folder, so it confirms its lock
before it renames anything there.

POSIX locks are not used: NFS mounts and Lustre may not support them, or only within one host.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.errors import ConfigError, LockstepError, printable
from lockstep.files.atomic import partial_of, replacing
from lockstep.files.output import say
from lockstep.files.untrusted import open_plain, parse_json

LOCK_FILE = ".lock"
TURN_SECONDS = 0.01
MAX_BYTES = 1 << 16
_TEXTS = ("purpose", "job", "host", "machine", "token")


@dataclass(frozen=True)
class LockTimes:
    """The times of a lock, all in seconds."""

    beat: float = 5.0
    silent: float = 60.0  # 12 beats: no job loses its folder to a file server that hangs for less
    watch: float = 15.0  # three beats, before the age of a lock counts
    poll: float = 0.5
    now: Callable[[], float] = time.monotonic


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
        succeeds: Whether it took the folder from a process that may still run. Its lock is then kept on exit, marked as
            released, so that the earlier process does not take the folder back.
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
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    succeeds: bool = False
    released: bool = False

    def follows(self, other: Owner) -> bool:
        """Return whether `other` must have exited because this process started."""
        return any(number > other.series[name] for name, number in self.series.items() if name in other.series)

    @property
    def is_here(self) -> bool:
        """Whether this process can check if the owner is running; other users' processes may be hidden."""
        return self.machine == _machine() and (self.uid == os.getuid() or _started(self.pid) is not None)

    @property
    def is_stale(self) -> bool:
        """Whether this owner is known to no longer hold the folder."""
        return self.released or (self.is_here and _started(self.pid) != self.started)

    def encode(self) -> bytes:
        return (json.dumps(asdict(self)) + "\n").encode()

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{self.purpose}{job}, process {self.pid} on {self.host}, since {since}"


UNKNOWN = Owner(
    "an unknown process", host="an unknown host", pid=0, uid=-1, machine="", started=0.0, since=0.0, token=""
)


class FolderLock:
    """A folder held by this process until `close`. Created by `hold_folder`."""

    def __init__(self, folder: Path, owner: Owner, times: LockTimes):
        self.folder = folder
        self._beat_seconds, self._now = times.beat, times.now
        self._owner, self._content = owner, owner.encode()
        self._path = folder / LOCK_FILE
        self._lost_to = ""
        self._confirmed = self._now()
        self._mutex = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if the folder is known to be lost. Reads the lock file only if this process was suspended.

        Raises:
            LockstepError: Another process took over the folder.
        """
        is_late = self._now() - self._confirmed > 2 * self._beat_seconds
        if self._lost_to or (is_late and not self._mutex.locked()):  # locked: the heartbeat waits for the file server
            self.confirm()

    def confirm(self) -> None:
        """Read the lock file and raise unless this process still holds the folder.

        Raises:
            LockstepError: Another process took over the folder.
        """
        with self._mutex:
            if not self._lost_to:
                self._read_again()
        if self._lost_to:
            raise LockstepError(
                f"{self.folder} is now held by {self._lost_to}; this process (pid {os.getpid()} on "
                f"{socket.gethostname()}) was suspended or disconnected for too long and exits without writing to it"
            )

    def close(self) -> None:
        """Release the folder, but not from a forked child."""
        if self._owner.pid != os.getpid():
            return
        self._closing.set()
        try:
            self._thread.join()
        finally:
            with suppress(OSError):
                self._release()

    def _release(self) -> None:
        if _read(self._path)[0] != self._content:
            return
        if self._owner.succeeds:
            with replacing(self._path) as partial:
                partial.write_bytes(replace(self._owner, released=True).encode())
        else:
            self._path.unlink()

    def _read_again(self) -> None:
        try:
            content, _ = _read(self._path)
        except FileNotFoundError:  # removed manually, possibly with the folder
            with suppress(OSError):
                if not _create(self._path, self._content):
                    return  # another process was faster; the next check names it
        except PermissionError:
            self._lost_to = "another user's process"
            return
        except OSError:
            return  # the file system is unavailable, for writes too
        else:
            if content != self._content:
                self._lost_to = str(_owner(content))
                return
        self._confirmed = self._now()

    def _beat(self) -> None:
        while not self._closing.wait(self._beat_seconds):
            try:
                with suppress(OSError):
                    self.confirm()
                    os.utime(self._path)
            except LockstepError:
                return


def hold_folder(folder: Path, owner: Owner, fix: str, times: LockTimes = LockTimes()) -> FolderLock:
    """Lock an existing folder against all other writers; wait while the last holder may still be running.

    Print a line to stderr before waiting for, and after taking over, a lock of another machine.

    Args:
        fix: What the user can do if the folder is in use, for the error message.

    Raises:
        ConfigError: Another process holds the folder.
        OSError: The lock cannot be written.
    """
    path = folder / LOCK_FILE
    watched, since, reported = None, 0.0, False
    while not _create(path, owner.encode()):
        try:
            seen = held, touched = _read(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise ConfigError(f"{path} is a dangling symbolic link; remove it") from None
            continue
        holder = _owner(held)
        successor = replace(owner, succeeds=holder.succeeds or not holder.is_here)
        if owner.follows(holder) or holder.is_stale:
            if _take_over(path, held, successor, times):
                return FolderLock(folder, successor, times)
            continue
        if holder.is_here or (watched or seen) != seen:
            raise ConfigError(f"{folder} is in use by {holder}; {fix}")
        if watched is None:
            watched, since = seen, time.monotonic()
        silent_seconds = _silence(folder, touched, owner.token, time.monotonic() - since, times)
        if silent_seconds > times.silent:
            if _take_over(path, held, successor, times):
                say(f"lockstep: took over {folder} from {holder}, which was silent for {silent_seconds:,.0f} s")
                return FolderLock(folder, successor, times)
        elif not reported and held:  # an empty lock is still being written
            say(f"lockstep: {folder} was in use by {holder}; waiting up to {times.silent:g} s for its heartbeat")
            reported = True
        time.sleep(times.poll)
    return FolderLock(folder, owner, times)


def holder_here(folder: Path) -> Owner | None:
    """Return the process of this machine that holds the folder, or None."""
    with suppress(OSError):
        holder = _owner(_read(folder / LOCK_FILE)[0])
        return holder if holder.is_here and not holder.is_stale else None
    return None


def holding(folder: Path, purpose: str) -> AbstractContextManager[object]:
    """Lock an existing folder, as `hold_folder` does, until the end of the block."""
    return closing(hold_folder(folder, Owner(purpose), "wait for it to exit, or choose another folder"))


def _create(path: Path, content: bytes) -> bool:
    """Create the lock file; return False if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read(path: Path) -> tuple[bytes, int]:
    """Return a lock file's content and modification time, in nanoseconds of the file server's clock.

    Opening the file makes NFS revalidate both.
    """
    try:
        with open_plain(path) as file:
            return file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
    except ValueError as error:
        raise OSError(f"{path} is not a regular file; remove it") from error


def _owner(content: bytes) -> Owner:
    """Parse a lock file; `UNKNOWN` if it is damaged or not yet written."""
    try:
        value: Any = parse_json(content)
        fields: dict[str, Any] = {name: printable(str(value[name])) for name in _TEXTS}
        fields |= {name: float(value[name]) for name in ("started", "since")}
        fields["series"] = {str(name): int(number) for name, number in value["series"].items()}
        fields |= {name: value.get(name) is True for name in ("succeeds", "released")}
        owner = Owner(**fields, pid=int(value["pid"]), uid=int(value["uid"]))
        return owner if str(owner) else UNKNOWN
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return UNKNOWN


def _silence(folder: Path, touched: int, token: str, watched_seconds: float, times: LockTimes) -> float:
    """Return the seconds since the lock's last heartbeat.

    This is the time for which the lock has been watched or, after `times.watch`, the age of the lock file on the file
    server's clock if that is larger. The age alone is not reliable, since some file systems use the host's clock.
    """
    if watched_seconds < times.watch:
        return watched_seconds
    probe = partial_of(folder / f"{LOCK_FILE}-{token}")
    probe.touch()
    now = probe.stat().st_mtime_ns
    probe.unlink(missing_ok=True)
    return max(watched_seconds, (now - touched) / 1e9)


def _take_over(path: Path, held: bytes, successor: Owner, times: LockTimes) -> bool:
    """Replace the lock whose content was `held` by the successor's; return False if it has changed.

    A second lock file serializes this, so that no process replaces a lock that another has just written.
    """
    turn, own = (partial_of(path.with_name(f"{LOCK_FILE}-{name}")) for name in ("turn", successor.token))
    if not _create(turn, successor.encode()):
        with suppress(FileNotFoundError):
            if abs(time.time() - turn.stat().st_mtime) > times.silent:  # its process was killed at this point
                turn.unlink()
        time.sleep(TURN_SECONDS)
        return False
    try:
        if _read(path)[0] != held:
            return False
        own.write_bytes(successor.encode())
        os.replace(own, path)
        return _read(path)[0] == successor.encode()
    except FileNotFoundError:
        return False
    finally:
        own.unlink(missing_ok=True)
        turn.unlink(missing_ok=True)


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
