"""Discover the current hosts and slots with a script or a function."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from tempfile import TemporaryFile
from typing import IO

from lockstep.errors import ConfigError
from lockstep.files.output import say
from lockstep.launch.node import parent_death
from lockstep.launch.plan.hosts import Host, parse_discovered, slots_of

POLL_SECONDS = 1.0
SCRIPT_SECONDS = 60.0
WAIT_SECONDS = 0.05
STOP_SECONDS = 10.0  # on a busy machine
MAX_BYTES = 1 << 20
FLAG = "--host-discovery-script"


class Discovery:
    """Query the hosts every second, in a thread; `hosts` is the last answer.

    If a query fails, `hosts` keeps its value; a warning is printed for the first of consecutive failures.

    Args:
        ask: Return the current hosts, as `discover` does.
        check: Raise ConfigError if the job cannot use the hosts.
        end: Set by `stop`, for `ask`.

    Raises:
        Exception: The first call of `ask` or `check` failed.
    """

    def __init__(
        self,
        ask: Callable[[], Sequence[Host]],
        check: Callable[[Sequence[Host]], object] = lambda hosts: None,
        end: threading.Event | None = None,
    ) -> None:
        self._ask_hosts = ask
        self._check = check
        self._end = end or threading.Event()
        self._by_script = end is not None
        self._warned = False
        self.hosts = self._ask()
        self._thread = threading.Thread(target=self._poll, name="lockstep-discovery", daemon=True)
        self._thread.start()

    @classmethod
    def by_script(
        cls, script: str, slots_per_host: int | None, check: Callable[[Sequence[Host]], object] = lambda hosts: None
    ) -> Discovery:
        """Query the hosts with a script; `stop` ends it if it is running."""
        end = threading.Event()
        return cls(partial(discover, script, slots_per_host, end), check, end)

    def stop(self) -> None:
        """Stop the queries and end a running script; do not wait for a running function."""
        self._end.set()
        if self._by_script:
            self._thread.join(STOP_SECONDS)

    def _poll(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            try:
                self.hosts = self._ask()
                self._warned = False
            except Exception as error:  # of a user-defined function
                if not self._warned and not self._end.is_set():
                    slots = slots_of(self.hosts)
                    say(f"lockstep: {error}; keeping the known {slots} slots")
                self._warned = True

    def _ask(self) -> Sequence[Host]:
        hosts = self._ask_hosts()
        self._check(hosts)
        return hosts


def discover(script: str, slots_per_host: int | None, end: threading.Event | None = None) -> tuple[Host, ...]:
    """Return the hosts that the script prints, and kill the processes that it leaves in its process group.

    Args:
        end: Setting it kills the script.

    Raises:
        ConfigError: The script fails, or prints a line that is not a host.
    """
    command = parent_death.command(["sh", "-c", script])
    with TemporaryFile() as out, TemporaryFile() as err:
        with subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True) as process:
            try:
                _wait(process, script, out, end or threading.Event())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        printed, errors = _end_of(out), _end_of(err).strip()
    if process.returncode:
        last = f": {errors.splitlines()[-1]}" if errors else ""
        raise ConfigError(f"{FLAG} {script} exited with code {process.returncode}{last}")
    return parse_discovered(printed, slots_per_host)


def _wait(process: subprocess.Popen[bytes], script: str, out: IO[bytes], end: threading.Event) -> None:
    """Wait until a script exits, even if a daemon that it started keeps its streams open.

    Raises:
        ConfigError: It takes too long or prints too much.
    """
    deadline = time.monotonic() + SCRIPT_SECONDS
    has_exited = False
    while not has_exited:
        with suppress(subprocess.TimeoutExpired):
            process.wait(WAIT_SECONDS)
            has_exited = True
        if os.fstat(out.fileno()).st_size > MAX_BYTES:
            raise ConfigError(f"{FLAG} {script} printed more than {MAX_BYTES:,} bytes")
        if end.is_set() or time.monotonic() > deadline:
            raise ConfigError(f"{FLAG} {script} took longer than {SCRIPT_SECONDS:g} s")


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_BYTES))
    return file.read(MAX_BYTES).decode(errors="replace")
