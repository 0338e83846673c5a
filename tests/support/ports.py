"""A port for a job that is told one."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One that nobody has, from below those that the system gives to whoever asks for any."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
