"""The slots of this machine from moment to moment, as a user's script prints them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Collection
from contextlib import suppress

from lockstep.errors import ConfigError
from lockstep.launch import tether
from lockstep.launch.display import say
from lockstep.launch.hosts import parse_discovered, slots_here

POLL_SECONDS = 1.0
SCRIPT_SECONDS = 60.0
FLAG = "--host-discovery-script"


class Discovery:
    """Runs the script every second in a thread of its own; `slots` is what it printed last.

    When it fails, the last known number stays, with one warning until it works again.

    Raises:
        ConfigError: The first run fails, or names another machine.
    """

    def __init__(self, script: str, slots_per_host: int | None, names: Collection[str]) -> None:
        self._script = script
        self._slots_per_host = slots_per_host
        self._names = names
        self._end = threading.Event()
        self._warned = False
        self.slots = self._ask()
        threading.Thread(target=self._poll, name="lockstep-discovery", daemon=True).start()

    def stop(self) -> None:
        self._end.set()

    def _poll(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            try:
                self.slots = self._ask()
                self._warned = False
            except (ConfigError, OSError, ValueError) as error:
                if not self._warned:
                    say(f"horovodrun: {error}; {self.slots} slots stay as they were")
                self._warned = True

    def _ask(self) -> int:
        command, pipe = tether.command(["sh", "-c", self._script]), subprocess.PIPE
        with subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(timeout=SCRIPT_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what the script has started
                raise ConfigError(f"{FLAG} {self._script} took longer than {SCRIPT_SECONDS:g} s") from None
        if process.returncode:
            said = f": {err.strip().splitlines()[-1]}" if err.strip() else ""
            raise ConfigError(f"{FLAG} {self._script} ended with exit code {process.returncode}{said}")
        return slots_here(parse_discovered(out, self._slots_per_host), self._names)
