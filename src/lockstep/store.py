"""A key-value store on loopback, served by this process for the workers of a job."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"


def serve_store() -> tuple[TCPStore, int]:
    """A store and its port; it is served as long as something refers to it.

    torch would listen on every address, so the store is handed a socket that listens on loopback alone.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server((LOOPBACK, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=listener.detach(),  # the store owns the socket from here on
    )
    return store, port
