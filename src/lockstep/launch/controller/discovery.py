"""The hosts and slots from moment to moment, as a user's script, or a function, says."""

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
    """Asks for the hosts every second in a thread of its own; `hosts` is the last answer.

    When that fails, what is known stays, with one warning until it works again.

    Args:
        ask: Says which hosts there are, as `discover` does.
        check: Raises ConfigError where the job can do nothing with the hosts.

    Raises:
        Exception: That of the first call, of `ask` or the check.
    """

    def __init__(
        self, ask: Callable[[], Sequence[Host]], check: Callable[[Sequence[Host]], object] = lambda hosts: None
    ) -> None:
        self._ask_hosts = ask
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
            except Exception as error:  # also a caller's own function
                if not self._warned and not self._end.is_set():
                    slots = slots_of(self.hosts)
                    say(f"lockstep: {error}; {slots} slots stay as they were")
                self._warned = True

    def _ask(self) -> Sequence[Host]:
        hosts = self._ask_hosts()
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
