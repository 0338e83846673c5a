"""The rendezvous: where the workers of a job find each other, whoever launched them.

torchrun and its like say where rank 0 is (MASTER_ADDR, MASTER_PORT). mpirun does not: on one host the workers then meet
through a small file of the user's, in which rank 0 writes the port that it has bound on loopback.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.errors import WorldError, first_line
from lockstep.store import LOOPBACK, serve_store
from lockstep.world import MPI, TORCHRUN_ADDRESS, Place

if TYPE_CHECKING:
    from torch.distributed import Store

# The processes of an MPI launcher that are the ancestors of all its workers on a host.
MPI_PARENTS = ("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "mpiexec.hydra")
POLL_SECONDS = 0.02


@cache  # the store of rank 0 is served by its process, and must live as long as the process
def open_store(place: Place, timeout_seconds: float) -> Store:
    """Connect to the job's key-value store.

    Raises:
        WorldError: It cannot be reached within the time, or nothing says where it is.
    """
    try:
        if place.launcher in MPI and not all(name in os.environ for name in TORCHRUN_ADDRESS):
            return _meet_on_this_host(place, timeout_seconds)
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=timeout_seconds)
        store: Store = next(rendezvous("env://", place.rank, place.size, timeout=timeout))[0]
        return store
    except (RuntimeError, ValueError, OSError) as error:
        address = ":".join(os.environ[name] for name in TORCHRUN_ADDRESS if name in os.environ)
        raise WorldError(
            f"worker {place.rank} on {socket.gethostname()} cannot meet the others{address and f' at {address}'} "
            f"within {timeout_seconds:g} s: {first_line(error)}"
        ) from error


def _meet_on_this_host(place: Place, timeout_seconds: float) -> Store:
    if place.local_size < place.size:
        raise WorldError(
            f"{place.launcher} does not say where rank 0 is; set MASTER_ADDR (the first host) and MASTER_PORT (a free "
            f"port there) for all workers, for example with mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500"
        )
    timeout = timedelta(seconds=timeout_seconds)
    file = _meeting_file()
    if place.rank == 0:
        store, port = serve_store()
        draft = file.with_suffix(".new")
        draft.write_text(str(port))
        draft.rename(file)
        others = [f"here/{rank}" for rank in range(1, place.size)]
        try:
            store.wait(others, timeout)
        except RuntimeError:
            missing = [key.rpartition("/")[2] for key in others if not store.check([key])]
            raise TimeoutError(f"no word from rank {', '.join(missing)}") from None
        finally:
            file.unlink()
        return store
    deadline = time.monotonic() + timeout_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file} did not appear")
        time.sleep(POLL_SECONDS)
    from torch.distributed import TCPStore

    store = TCPStore(LOOPBACK, int(file.read_text()), is_master=False, timeout=timeout)
    store.set(f"here/{place.rank}", "")
    return store


def _meeting_file() -> Path:
    """A file name that the workers of one launch, and no others, have in common."""
    folder = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise WorldError(f"{folder} belongs to somebody else; set TMPDIR to a folder of your own")
    parents = psutil.Process().parents()
    launcher = next((parent for parent in parents if parent.name() in MPI_PARENTS), parents[0])
    return folder / f"{launcher.pid}-{launcher.create_time():.2f}"
