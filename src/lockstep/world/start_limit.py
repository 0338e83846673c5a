"""How long the parts of a job wait for each other when it starts: one rule for launchers, hvd.init() and the trainer.

Hosts must answer their launcher within 120 s. What follows may read gigabytes from a busy file system: each host's
import of torch, and the workers' wait for each other, are limited to 600 s. HOROVOD_START_TIMEOUT sets the first and
the last of these; `--start-timeout` sets the first and raises the others where it is longer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.errors import ConfigError

START_TIMEOUT = "HOROVOD_START_TIMEOUT"
HOST_SECONDS = 120.0
WORKERS_SECONDS = 600.0


def start_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """The limit that the environment sets, in seconds; None where it sets none.

    Raises:
        ConfigError: The variable does not hold a positive number.
    """
    text = environment.get(START_TIMEOUT, "")
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"{START_TIMEOUT}={text}: must be a number of seconds above 0")
    return seconds


def load_here() -> str:
    """This machine's load, for messages about what was late."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
