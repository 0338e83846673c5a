"""Time limits for the start of a job: one rule for launchers, hvd.init() and the trainer.

Hosts must answer their launcher within 120 s. The next steps may read gigabytes from a busy file system: importing
torch on each host, and the rendezvous of the workers, are limited to 600 s each. HOROVOD_START_TIMEOUT sets the limits
for the answer and the rendezvous; `--start-timeout` sets the first and raises the others if it is longer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.errors import ConfigError

START_TIMEOUT = "HOROVOD_START_TIMEOUT"
HOST_SECONDS = 120.0
WORKERS_SECONDS = 600.0


def start_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the limit that the environment sets, in seconds, or None.

    Raises:
        ConfigError: The variable does not hold a positive number.
    """
    text = environment.get(START_TIMEOUT, "")
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"{START_TIMEOUT}={text}: must be a positive number of seconds")
    return seconds


def load_here() -> str:
    """Describe this machine's load, for messages about timeouts."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
