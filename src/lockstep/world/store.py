"""Serve a job's key-value store, on one address of this machine or on all."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

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
