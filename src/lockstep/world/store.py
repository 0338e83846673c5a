"""The job's key-value store, and the time limits for the start of a job.

One rule for launchers, hvd.init() and the trainer: hosts must answer their launcher within 120 s. The next steps may
read gigabytes from a busy file system: importing torch on each host, and the rendezvous of the workers, are limited
to 600 s each. HOROVOD_START_TIMEOUT sets the limits for the answer and the rendezvous; `--start-timeout` sets the first
and raises the others if it is longer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

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


LOOPBACK = "127.0.0.1"
EVERYWHERE = ""


def serve_store(address: str = LOOPBACK, port: int = 0) -> tuple[TCPStore, int]:
    """Return a new store and its port (a free one for 0). It is served while it is referenced.

    torch would listen on all addresses, so the store gets a socket that listens on a single one: loopback, unless a
    job on several hosts needs another.
    """
    from torch.distributed import TCPStore

    both = address == EVERYWHERE and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024, dualstack_ipv6=both)
    port = listener.getsockname()[1]
    store = TCPStore(
        address or LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=listener.detach(),  # the store owns the socket now
    )
    return store, port
