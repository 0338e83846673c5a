"""Free ports for jobs that need a fixed one."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return an unused port below the ephemeral range, so that no other process gets it by chance."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
