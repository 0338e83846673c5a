"""The rendezvous: where the workers of a job find each other, whoever launched them.

torchrun and Lockstep's launcher serve a store and say where. Other launchers do not: on one host the workers then meet
through a small file of the user's, in which rank 0 writes the port that it has bound on loopback; on several, at an
address that follows from the launcher's variables (`lockstep.world.rank0_address`).
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.errors import WorldError, first_line
from lockstep.files.atomic import replacing
from lockstep.world.interfaces import choose_interface, listening_address
from lockstep.world.launcher_environment import ADDRESS, Place
from lockstep.world.rank0_address import find_address, is_here, launch_name
from lockstep.world.start_limit import START_TIMEOUT, load_here
from lockstep.world.store import LOOPBACK, serve_store

if TYPE_CHECKING:
    from torch.distributed import Store

# The processes of a launcher that are the ancestors of all its workers on a host.
PARENTS = (
    *("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "mpiexec.hydra"),
    *("mpirun.openmpi", "mpirun.mpich", "mpispawn", "palsd", "jsmd", "slurmstepd"),
)
POLL_SECONDS = 0.02
SET_ADDRESS = "set MASTER_ADDR for all workers to an address of rank 0's host that all hosts reach"

_stores: dict[Place, Store] = {}  # rank 0's process serves its store, which must live as long as the process


def open_store(place: Place, timeout_seconds: float) -> Store:
    """Connect to the job's key-value store; at each call of a process the same one.

    Raises:
        WorldError: It cannot be reached within the time, or nothing says where it is.
    """
    if place not in _stores:
        _stores[place] = _open(place, timeout_seconds)
    return _stores[place]


def _open(place: Place, timeout_seconds: float) -> Store:
    address = ":".join(os.environ[name] for name in ADDRESS if name in os.environ)
    begun = time.monotonic()
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from torch.distributed.rendezvous import rendezvous

            timeout = timedelta(seconds=timeout_seconds)
            store: Store = next(rendezvous("env://", place.rank, place.size, timeout=timeout))[0]
            host = os.environ["MASTER_ADDR"]
        elif place.local_size == place.size and "MASTER_PORT" not in os.environ:
            host, store = LOOPBACK, _meet_on_this_host(place, timeout_seconds)
        else:
            host, port = find_address(place)
            address = f"{host}:{port}"
            store = _meet_at(host, port, place, timeout_seconds)
        choose_interface(place, store, host)
        return store
    except (RuntimeError, ValueError, OSError) as error:
        is_late = time.monotonic() - begun >= timeout_seconds
        fix = f"; are they still starting ({load_here()})? {START_TIMEOUT} sets the limit" if is_late else ""
        raise WorldError(
            f"worker {place.rank} on {socket.gethostname()} cannot meet the others{address and f' at {address}'} "
            f"within {timeout_seconds:g} s: {first_line(error)}{fix}"
        ) from error


def _meet_at(host: str, port: int, place: Place, timeout_seconds: float) -> Store:
    """Meet at rank 0's address."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_seconds)
    launch = f"lockstep/{launch_name(place)} of {place.size}"  # known to the right store alone
    if place.rank != 0:
        door = (listening_address(host) or host) if is_here(host) else host
        try:
            store = TCPStore(door, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise TimeoutError(
                f"{first_line(error)}; {door} means {_meaning(door)} on this host; {SET_ADDRESS}"
            ) from None
        try:
            store.wait([launch], timeout)
        except RuntimeError:
            raise TimeoutError("another job answers there; set MASTER_PORT to a free port of that host") from None
        store.set(f"here/{place.rank}", "")
        return store
    here = socket.gethostname()
    if not is_here(host):
        raise WorldError(
            f"rank 0 runs on {here}, not on {host}, where {place.launcher}'s variables have the others look for it; "
            f"set MASTER_ADDR={here} for all workers"
        )
    address = listening_address(host)
    try:
        store, _ = serve_store(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise WorldError(
                f"{host} means {address} on {here}, which is no address of that host; {SET_ADDRESS}"
            ) from error
        if error.errno != errno.EADDRINUSE:
            raise
        source = "MASTER_PORT names" if "MASTER_PORT" in os.environ else "the job's number gives"
        raise WorldError(
            f"port {port} of {here}, which {source}, is in use; set MASTER_PORT to a free one for all workers"
        ) from error
    store.set(launch, "")
    door = f"; rank 0 listens on {address or 'all addresses'} of {here}, port {port}: {SET_ADDRESS}"
    _wait_for_others(store, place, timeout, door if address != LOOPBACK else "")
    return store


def _meaning(host: str) -> str:
    """The addresses that a name has on this host, for messages."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return "no address"
    return ", ".join(dict.fromkeys(str(info[4][0]) for info in infos))


def _wait_for_others(store: Store, place: Place, timeout: timedelta, door: str = "") -> None:
    """Wait until all have come; `door` is what the error says of where they were waited for."""
    others = [f"here/{rank}" for rank in range(1, place.size)]
    try:
        store.wait(others, timeout)
    except RuntimeError:
        missing = [key.rpartition("/")[2] for key in others if not store.check([key])]
        raise TimeoutError(f"no word from rank {', '.join(missing)}{door}") from None


def _meet_on_this_host(place: Place, timeout_seconds: float) -> Store:
    timeout = timedelta(seconds=timeout_seconds)
    file = _meeting_file()
    if place.rank == 0:
        store, port = serve_store()
        with replacing(file) as partial:
            partial.write_text(str(port))
        try:
            _wait_for_others(store, place, timeout)
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
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise WorldError(
            f"{folder} is not a folder that you alone can write to: remove it, or set TMPDIR to a folder of your own"
        )
    parents = psutil.Process().parents()
    launcher = next((parent for parent in parents if parent.name() in PARENTS), parents[0])
    return folder / f"{launcher.pid}-{launcher.create_time():.2f}"
