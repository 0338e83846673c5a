"""A job of `lockstep run` on a bed's hosts, started from any of them and observed from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil
from hosts import HEAD, Bed
from time_limits import LIMIT_SECONDS, extended, wait_until
from worker_script import HERE

WORKER = Path(__file__).parent / "worker_script.py"
HOSTS = "node1:2,node2:1"
T = TypeVar("T")


class Job:
    """`lockstep run ... -- command` from the head; a context manager that leaves no process behind.

    `hosts` is the value of -H, or @ and the name of a host file. Without a `command`, workers run `worker_script.py`
    with `actions`. `direct` replaces all of this by a command that starts the workers itself.
    """

    def __init__(
        self,
        bed: Bed,
        folder: Path,
        *actions: str,
        command: Sequence[str] = (),
        hosts: str = HOSTS,
        options: Sequence[str] = (),
        start_from: str = HEAD,
        direct: Sequence[str] = (),
    ) -> None:
        self.bed = bed
        self.folder = folder
        self.ready = folder / "ready"
        self.ready.mkdir(parents=True)
        self._out, self._err = folder / "out.txt", folder / "err.txt"
        where = ["--hostfile", hosts[1:]] if hosts.startswith("@") else ["-H", hosts]
        words = [*where, f"--ssh-option={bed.ssh_options}", "--log-dir", str(folder / "logs"), *options]
        self._tells = not command and not direct
        command = command or [sys.executable, "-S", "-E", str(WORKER), str(self.ready), *actions]
        line = [*direct] or [sys.executable, "-m", "lockstep", "run", *words, "--", *command]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.launcher = bed.start(start_from, line, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(f"--- stdout\n{self.stdout}--- stderr\n{self.stderr}--- processes\n{self.survivors()}")
        if self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        for name in self.bed.addresses:
            for process in self.bed.processes(name):
                kill(process.pid)

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def workers(self, count: int) -> dict[int, dict[str, Any]]:
        """Wait until `count` workers run and the launcher has their output; return what they wrote, by rank."""
        self.wait_until(lambda: len(list(self.ready.glob("*.json"))) >= count)
        if self._tells:
            self.wait_until(lambda: self.stdout.count(HERE) >= count)
        return {int(path.stem): json.loads(path.read_text()) for path in sorted(self.ready.glob("*.json"))}

    def wait_until(self, condition: Callable[[], T], seconds: float = LIMIT_SECONDS) -> T:
        """Wait for a condition while the launcher runs; return its value.

        Raises:
            AssertionError: The launcher exited, or the wait timed out.
        """

        def found() -> T:
            value, code = condition(), self.launcher.poll()
            assert value or code is None, f"the launcher ended with {code}: {self.stderr}"
            return value

        return wait_until(found, seconds, lambda: self.stderr)

    def tell(self, name: str) -> None:
        """Let workers continue that wait for this name (`when=NAME`)."""
        (self.ready / name).touch()

    def signal(self, number: signal.Signals) -> None:
        self.launcher.send_signal(number)

    def wait(self, seconds: float = LIMIT_SECONDS) -> int:
        """Wait for the launcher; return its exit code."""
        return extended(self.launcher.wait, seconds)

    def survivors(self) -> list[str]:
        """Return the job's processes on all hosts and the head, as "host: pid status command".

        The hosts' sshd processes are not counted: after a link went down, they wait for the other end.
        """
        found = [(name, process) for name in self.bed.addresses for process in self.bed.processes(name)]
        return [f"{name}: {describe(process)}" for name, process in found if name_of(process) not in ("", "sshd")]

    def wait_for_end(self, seconds: float) -> None:
        """Wait until nothing runs on any host.

        Raises:
            AssertionError: A process is still running.
        """

        def is_over() -> bool:
            self.launcher.poll()
            return not self.survivors()

        wait_until(is_over, seconds, lambda: f"still there: {self.survivors()}")

    def files_left(self) -> list[str]:
        """Return the files in the hosts' TMPDIR and /dev/shm that Lockstep has to remove.

        Not torch's cache, killed loaders' sockets, and the empty files that torch's DataLoader creates when it
        receives no batch: the exception in its handler of a loader's death can come between creation and removal.
        """
        paths = [path for name in self.bed.addresses for path in self.bed.files(name)]
        names = "torchinductor_", "pymp-"
        return [str(path) for path in paths if not (path.name.startswith(names) or _is_torchs_trial(path))]

    def last_lines(self) -> list[str]:
        """Return the lines of stderr from the launcher's report on."""
        lines = self.stderr.splitlines()
        return lines[max(at for at, line in enumerate(lines) if line.startswith("lockstep: ")) :]


def _is_torchs_trial(path: Path) -> bool:
    return path.name.startswith(tempfile.gettempprefix()) and path.is_file() and path.stat().st_size == 0


def name_of(process: psutil.Process) -> str:
    """Return the program's name, or "" if it has exited."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.name()
    except psutil.Error:
        return ""


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:150]}"
    except psutil.Error:
        return f"{process.pid} (ended meanwhile)"


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a process that may have exited."""
    try:
        psutil.Process(pid).send_signal(number)
    except psutil.Error:
        return False
    return True
