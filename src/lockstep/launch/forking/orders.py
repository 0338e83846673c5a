"""What the node process and the preloaded process send each other, over a socket.

A message is 8 bytes with the length of the JSON that follows, sent with the descriptors of the workers' streams.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

LENGTH_BYTES = 8
MAX_DESCRIPTORS = 253  # per message (SCM_MAX_FD, man 7 unix)
NO_TORCH = 70  # exit code of a process that was to serve the store


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(LENGTH_BYTES, "big")], descriptors)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors; None at the end of the stream."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MAX_DESCRIPTORS)
    if len(head) < LENGTH_BYTES:
        return None, descriptors
    body = b""
    while len(body) < (length := int.from_bytes(head, "big")):
        chunk = connection.recv(min(length - len(body), 1 << 20))
        if not chunk:
            return None, descriptors
        body += chunk
    message: dict[str, Any] = json.loads(body)
    return message, descriptors
