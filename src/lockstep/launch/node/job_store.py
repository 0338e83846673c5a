"""The store of a job, torch's TCPStore, for its workers: `python -P -m lockstep.launch.node.job_store FD ADDRESS PORT`.

The first host's node process opens the socket. This process is forked together with the workers. If each worker starts
its own interpreter, this process is started at the first connection, so that a job without torch does not import it.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def serve(listener: int, address: str, port: int) -> NoReturn:
    """Serve a store on a listening socket until this process is killed."""
    try:
        from torch.distributed import TCPStore
    except ImportError:  # a torch without TCPStore, whose workers use no store
        store = None
    else:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while True:
        signal.pause()
        assert store or listener  # keeps the references: both are served while they are referenced


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
