"""Free ports for jobs that need a fixed one."""

from __future__ import annotations

import socket
from random import SystemRandom


def free_port() -> int:
    """Return an unused port below the ephemeral range, so that no other process gets it by chance.

    Not from the global generator: tests seed it alike, and two of them at once would choose the same port.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
