"""Discover the current hosts and slots with a script."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
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
READ_SECONDS = 0.05
STOP_SECONDS = 10.0  # on a busy machine
MAX_BYTES = 1 << 20
FLAG = "--host-discovery-script"


class Discovery:
    """Query the hosts with a script every second, in a thread; `hosts` is the last answer.

    If a query fails, `hosts` keeps its value; a warning is printed for the first of consecutive failures.

    Raises:
        ConfigError: The first query failed.
    """

    def __init__(self, script: str, slots_per_host: int | None) -> None:
        self._end = threading.Event()
        self._ask = partial(discover, script, slots_per_host, self._end)
        self._warned = False
        self.hosts = self._ask()
        self._thread = threading.Thread(target=self._poll, name="lockstep-discovery", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the queries, and end the script if it is running."""
        self._end.set()
        self._thread.join(STOP_SECONDS)

    def _poll(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            try:
                self.hosts = self._ask()
                self._warned = False
            except ConfigError as error:
                if not self._warned and not self._end.is_set():
                    slots = slots_of(self.hosts)
                    say(f"lockstep: {error}; keeping the known {slots} slots")
                self._warned = True


def discover(script: str, slots_per_host: int | None, end: threading.Event | None = None) -> tuple[Host, ...]:
    """Return the hosts that the script prints, and kill the processes that it leaves in its process group.

    Args:
        end: Setting it kills the script.

    Raises:
        ConfigError: The script fails, or prints a line that is not a host.
    """
    command = parent_death.command(["sh", "-c", script])
    with TemporaryFile() as out, TemporaryFile() as err:  # not pipes, which a daemon of the script may keep open
        with subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True) as process:
            try:
                _wait_for_exit(process, script, (out, err), end or threading.Event())
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        printed, complaint = (_content(file) for file in (out, err))
    if process.returncode:
        last = f": {complaint.strip().splitlines()[-1]}" if complaint.strip() else ""
        raise ConfigError(f"{FLAG} {script} exited with code {process.returncode}{last}")
    return parse_discovered(printed, slots_per_host)


def _wait_for_exit(
    process: subprocess.Popen[bytes], script: str, streams: Sequence[IO[bytes]], end: threading.Event
) -> None:
    """Wait for a process that writes to `streams`.

    Raises:
        ConfigError: It takes too long or prints too much.
    """
    deadline = time.monotonic() + SCRIPT_SECONDS
    is_over = False
    while not is_over:
        is_over = process.poll() is not None
        if any(os.fstat(each.fileno()).st_size >= MAX_BYTES for each in streams):
            raise ConfigError(f"{FLAG} {script} printed more than {MAX_BYTES:,} bytes")
        if not is_over and (end.wait(READ_SECONDS) or time.monotonic() > deadline):
            raise ConfigError(f"{FLAG} {script} took longer than {SCRIPT_SECONDS:g} s")


def _content(file: IO[bytes]) -> str:
    """Return what a process has written to a file."""
    file.seek(0)
    return file.read(MAX_BYTES).decode(errors="replace")
