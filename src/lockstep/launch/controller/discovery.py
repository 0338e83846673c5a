"""The hosts and slots from moment to moment, as a user's script prints them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from lockstep.errors import ConfigError
from lockstep.launch.node import parent_death
from lockstep.launch.output.display import say
from lockstep.launch.plan.hosts import Host, parse_discovered, slots_of

POLL_SECONDS = 1.0
SCRIPT_SECONDS = 60.0
FLAG = "--host-discovery-script"


class Discovery:
    """Runs the script every second in a thread of its own; `hosts` is what it printed last.

    When it fails, what is known stays, with one warning until it works again.

    Args:
        slots_per_host: For a line without a number.
        check: Raises ConfigError where the job can do nothing with the hosts.

    Raises:
        ConfigError: The first run fails, or does not pass the check.
    """

    def __init__(self, script: str, slots_per_host: int | None, check: Callable[[Sequence[Host]], object]) -> None:
        self._script = script
        self._slots_per_host = slots_per_host
        self._check = check
        self._end = threading.Event()
        self._warned = False
        self.hosts = self._ask()
        threading.Thread(target=self._poll, name="lockstep-discovery", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _poll(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            try:
                self.hosts = self._ask()
                self._warned = False
            except (ConfigError, OSError, ValueError) as error:
                if not self._warned:
                    slots = slots_of(self.hosts)
                    say(f"lockstep: {error}; {slots} slots stay as they were")
                self._warned = True

    def _ask(self) -> tuple[Host, ...]:
        hosts = discover(self._script, self._slots_per_host)
        self._check(hosts)
        return hosts


def discover(script: str, slots_per_host: int | None) -> tuple[Host, ...]:
    """The hosts that the script prints now.

    Raises:
        ConfigError: It fails, or prints what names no host.
    """
    command, pipe = parent_death.command(["sh", "-c", script]), subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=SCRIPT_SECONDS)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the script has started
            raise ConfigError(f"{FLAG} {script} took longer than {SCRIPT_SECONDS:g} s") from None
    if process.returncode:
        said = f": {err.strip().splitlines()[-1]}" if err.strip() else ""
        raise ConfigError(f"{FLAG} {script} ended with exit code {process.returncode}{said}")
    return parse_discovered(out, slots_per_host)
