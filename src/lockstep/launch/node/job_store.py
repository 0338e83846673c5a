"""The store of a job, torch's TCPStore, for its workers: `python -P -m lockstep.launch.node.job_store FD ADDRESS PORT`.

The first host's node process listens there itself. It has this forked together with the workers or, where they start by
themselves, starts it when somebody first connects: a job that needs no torch imports none.
"""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


def serve(listener: int, address: str, port: int) -> NoReturn:
    """Serve a store at a socket that listens already, until this process is killed."""
    try:
        from torch.distributed import TCPStore
    except ImportError:  # a torch without it, whose workers ask for no store
        store = None
    else:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while True:
        signal.pause()
        assert store or listener  # both are served as long as they are referred to


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
