"""The rendezvous of a job under any launcher: its key-value store, and the time limits for the start of a job.

torchrun and Lockstep's launcher serve a store and set its address. Under other launchers, rank 0 serves it: on one
host, it writes its loopback port to a small file that the other workers read; on several hosts, the address is
derived from the launcher's variables (`lockstep.world.rank0_address`).

One rule for launchers, hvd.init() and the trainer: hosts must answer their launcher within 120 s. The next steps may
read gigabytes from a busy file system: importing torch on each host, and the rendezvous of the workers, are limited
to 600 s each. HOROVOD_START_TIMEOUT sets the limits for the answer and the rendezvous; `--start-timeout` sets the first
and raises the others if it is longer.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lockstep.diagnosis import NODE
from lockstep.errors import ConfigError, WorldError, first_line
from lockstep.files.atomic import replacing
from lockstep.world.interfaces import EVERYWHERE, LOOPBACK, choose_interface, listening_address
from lockstep.world.launcher_environment import ADDRESS, HOROVOD, HOROVOD_ADDRESS, RankInfo
from lockstep.world.rank0_address import find_address, is_here, launch_name

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

START_TIMEOUT = "HOROVOD_START_TIMEOUT"
HOST_SECONDS = 120.0
WORKERS_SECONDS = 600.0


def start_limit(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the limit that the environment sets, in seconds, or None.

    Raises:
        ConfigError: The variable does not hold a positive number.
    """
    text = environment.get(START_TIMEOUT, "")
    try:
        seconds = float(text) if text else None
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"{START_TIMEOUT}={text}: must be a positive number of seconds")
    return seconds


def load_here() -> str:
    """Describe this machine's load, for messages about timeouts."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


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


# Launcher processes that are ancestors of all workers on a host.
PARENTS = (
    *("mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "hydra_pmi_proxy", "mpiexec.hydra"),
    *("mpirun.openmpi", "mpirun.mpich", "mpispawn", "palsd", "jsmd", "slurmstepd"),
)
POLL_SECONDS = 0.02
SET_ADDRESS = "set MASTER_ADDR for all workers to an address of rank 0's host that all hosts can reach"

_stores: dict[RankInfo, Store] = {}  # kept, because rank 0's process serves its store until it exits


def open_store(rank_info: RankInfo, timeout_seconds: float) -> Store:
    """Connect to the job's key-value store; return the same one at each call in a process.

    Raises:
        WorldError: It cannot be reached within the time, or its address is unknown.
    """
    if rank_info not in _stores:
        _stores[rank_info] = _open(rank_info, timeout_seconds)
    return _stores[rank_info]


def forget_stores() -> None:
    """Forget the stores of earlier generations."""
    _stores.clear()


def exchange(store: Store, rank: int, size: int, own: Any, key: str = "exchanged") -> list[Any]:
    """Return the JSON values of all workers, by rank. Every worker calls this, once for a store and a key."""
    store.set(f"{key}/{rank}", json.dumps(own))
    return [json.loads(value) for value in store.multi_get([f"{key}/{other}" for other in range(size)])]


def _open(rank_info: RankInfo, timeout_seconds: float) -> Store:
    names = HOROVOD_ADDRESS if rank_info.launcher == HOROVOD.name and NODE in os.environ else ADDRESS
    address = ":".join(os.environ[name] for name in names if name in os.environ)
    begun = time.monotonic()
    try:
        timeout = timedelta(seconds=timeout_seconds)
        if names is HOROVOD_ADDRESS:
            from torch.distributed import TCPStore

            host, port = os.environ[names[0]], int(os.environ[names[1]])
            store: Store = TCPStore(host, port, is_master=False, timeout=timeout)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from torch.distributed.rendezvous import rendezvous

            store = next(rendezvous("env://", rank_info.rank, rank_info.size, timeout=timeout))[0]
            host = os.environ["MASTER_ADDR"]
        elif rank_info.local_size == rank_info.size and "MASTER_PORT" not in os.environ:
            host, store = LOOPBACK, _meet_on_this_host(rank_info, timeout_seconds)
        else:
            host, port = find_address(rank_info)
            address = f"{host}:{port}"
            store = _meet_at(host, port, rank_info, timeout_seconds)
        choose_interface(rank_info, store, host)
        return store
    except (RuntimeError, ValueError, OSError) as error:
        is_late = time.monotonic() - begun >= timeout_seconds
        fix = f"; if they are still starting ({load_here()}), raise {START_TIMEOUT}" if is_late else ""
        raise WorldError(
            f"worker {rank_info.rank} on {socket.gethostname()} cannot reach the other workers"
            f"{address and f' at {address}'} within {timeout_seconds:g} s: {first_line(error)}{fix}"
        ) from error


def _meet_at(host: str, port: int, rank_info: RankInfo, timeout_seconds: float) -> Store:
    """Connect to the store at rank 0's address; on rank 0, serve it there."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=timeout_seconds)
    launch = f"lockstep/{launch_name(rank_info)} of {rank_info.size}"  # a key that only this job's store has
    if rank_info.rank != 0:
        target = (listening_address(host) or host) if is_here(host) else host
        try:
            store = TCPStore(target, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise TimeoutError(
                f"{first_line(error)}; {target} resolves to {_resolved(target)} on this host; {SET_ADDRESS}"
            ) from None
        try:
            store.wait([launch], timeout)
        except RuntimeError:
            raise TimeoutError("another job listens there; set MASTER_PORT to a free port of that host") from None
        store.set(f"here/{rank_info.rank}", "")
        return store
    here = socket.gethostname()
    if not is_here(host):
        raise WorldError(
            f"rank 0 runs on {here}, but {rank_info.launcher}'s variables direct the other workers to {host}; "
            f"set MASTER_ADDR={here} for all workers"
        )
    address = listening_address(host)
    try:
        store, _ = serve_store(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise WorldError(
                f"{host} resolves to {address} on {here}, which is not an address of that host; {SET_ADDRESS}"
            ) from error
        if error.errno != errno.EADDRINUSE:
            raise
        source = "MASTER_PORT" if "MASTER_PORT" in os.environ else "derived from the job's number"
        raise WorldError(
            f"port {port} of {here} ({source}) is in use; set MASTER_PORT to a free one for all workers"
        ) from error
    store.set(launch, "")
    hint = f"; rank 0 listens on {address or 'all addresses'} of {here}, port {port}: {SET_ADDRESS}"
    _wait_for_others(store, rank_info, timeout, hint if address != LOOPBACK else "")
    return store


def _resolved(host: str) -> str:
    """Return the addresses of a name on this host, for messages."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return "no address"
    return ", ".join(dict.fromkeys(str(info[4][0]) for info in infos))


def _wait_for_others(store: Store, rank_info: RankInfo, timeout: timedelta, hint: str = "") -> None:
    """Wait until all workers have connected; `hint` ends the error message."""
    others = [f"here/{rank}" for rank in range(1, rank_info.size)]
    try:
        store.wait(others, timeout)
    except RuntimeError:
        missing = [key.rpartition("/")[2] for key in others if not store.check([key])]
        raise TimeoutError(f"rank {', '.join(missing)} did not connect{hint}") from None


def _meet_on_this_host(rank_info: RankInfo, timeout_seconds: float) -> Store:
    timeout = timedelta(seconds=timeout_seconds)
    file = _meeting_file()
    if rank_info.rank == 0:
        store, port = serve_store()
        with replacing(file) as partial:
            partial.write_text(str(port))
        try:
            _wait_for_others(store, rank_info, timeout)
        finally:
            file.unlink()
        return store
    deadline = time.monotonic() + timeout_seconds
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 did not write {file}")
        time.sleep(POLL_SECONDS)
    from torch.distributed import TCPStore

    store = TCPStore(LOOPBACK, int(file.read_text()), is_master=False, timeout=timeout)
    store.set(f"here/{rank_info.rank}", "")
    return store


def _meeting_file() -> Path:
    """Return a file name that only the workers of this launch share."""
    folder = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise WorldError(
            f"{folder} is not a folder that only you can write to; remove it, or set TMPDIR to a folder of yours"
        )
    parents = psutil.Process().parents()
    launcher = next((parent for parent in parents if parent.name() in PARENTS), parents[0])
    return folder / f"{launcher.pid}-{launcher.create_time():.2f}"
