"""Discover the current hosts and slots with a script or a function."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

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
    command, pipe = parent_death.command(["sh", "-c", script]), subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            out, err = _read_until_exit(process, script, end or threading.Event())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        last = f": {err.strip().splitlines()[-1]}" if err.strip() else ""
        raise ConfigError(f"{FLAG} {script} exited with code {process.returncode}{last}")
    return parse_discovered(out, slots_per_host)


def _read_until_exit(process: subprocess.Popen[bytes], script: str, end: threading.Event) -> tuple[str, str]:
    """Return a process's stdout and stderr when it exits, even if a daemon that it started keeps them open.

    Raises:
        ConfigError: It takes too long or prints too much.
    """
    assert process.stdout
    assert process.stderr
    printed = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    deadline = time.monotonic() + SCRIPT_SECONDS
    with selectors.DefaultSelector() as selector:
        for descriptor in printed:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        has_exited = False
        while not has_exited:
            has_exited = process.poll() is not None  # then the pipes hold the rest of its output
            for key, _ in selector.select(0.0 if has_exited else READ_SECONDS):
                part = os.read(key.fd, MAX_BYTES)
                printed[key.fd] = (printed[key.fd] + part)[-MAX_BYTES:]
                if not part:
                    selector.unregister(key.fd)
            if len(printed[process.stdout.fileno()]) == MAX_BYTES:
                raise ConfigError(f"{FLAG} {script} printed more than {MAX_BYTES:,} bytes")
            if end.is_set() or time.monotonic() > deadline:
                raise ConfigError(f"{FLAG} {script} took longer than {SCRIPT_SECONDS:g} s")
    out, err = (text.decode(errors="replace") for text in printed.values())
    return out, err
