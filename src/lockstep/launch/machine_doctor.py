"""The checks of `lockstep doctor`: facts of this machine, each with a fix if it is a problem."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from lockstep import __version__
from lockstep.errors import WorldError
from lockstep.launch.gpus_doctor import try_gpus
from lockstep.launch.plan.site_profiles import Site
from lockstep.world import accelerator, machine
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo

GIB = 1 << 30
MIN_PYTHON, MIN_TORCH = (3, 11), (2, 8)
MIN_DISK_BYTES = 1 * GIB
MIN_SHARED_MEMORY_BYTES = GIB // 4
MIN_OPEN_FILES = 1024


@dataclass(frozen=True)
class Fact:
    """One fact, and the `fix` if it is a problem."""

    subject: str
    found: str
    fix: str = ""


def examine(site: Site | None = None) -> list[Fact]:
    """Check everything that a job on this machine depends on, and what the site's profile expects."""
    together = list(_gpus_together())  # before this process uses a GPU, which may allow only one process
    own = _site(site) if site else ()
    return [*_versions(), *_devices(), *together, _backends(), _launcher(), *_machine(), *_storage(), _loopback(), *own]


def _site(site: Site) -> Iterator[Fact]:
    import psutil

    yield Fact("site", site.origin)
    if site.torch:
        yield Fact("torch of the site", f"{site.torch}; here {version('torch')}")
    if site.launcher:
        yield Fact("launcher of the site", f"{site.launcher}: {shutil.which(site.launcher) or 'not in PATH'}")
    if site.interfaces:
        missing = [name for name in site.interfaces if name not in psutil.net_if_addrs()]
        found = f"{', '.join(missing)} not here (login nodes may lack them)" if missing else "all here"
        yield Fact("interfaces of the site", f"{', '.join(site.interfaces)}: {found}")
    for name, value in {**site.variables, **site.network}.items():
        own = os.environ.get(name)
        if own is not None and "$" not in value and own != value:
            yield Fact(name, own, f"site {site.name} documents {name}={value}; unset yours, or keep it knowingly")


def _versions() -> Iterator[Fact]:
    yield Fact("Lockstep", __version__)
    fix = "" if sys.version_info >= MIN_PYTHON else "Lockstep needs Python 3.11 or newer"
    yield Fact("Python", f"{platform.python_version()} ({sys.executable})", fix)
    found = version("torch")
    number = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    yield Fact(
        "torch",
        found,
        "" if number >= MIN_TORCH else "Lockstep needs torch 2.8 or newer; run pip install -U torch",
    )
    yield Fact("torchvision", version("torchvision"))


def _devices() -> Iterator[Fact]:
    import torch

    kind, drivers = accelerator.kind(), ", ".join(machine.drivers())
    for index in range(accelerator.count()):
        device = torch.device(kind or "cpu", index)
        memory = accelerator.total_memory(device) / GIB
        yield Fact(f"GPU {index}", f"{accelerator.name(device)}, {memory:.0f} GiB ({accelerator.identity(device)})")
    fix = _why_no_gpu(drivers) if kind is None else ""
    found = "none; " if kind is None else ""
    yield Fact("GPUs", f"{found}driver: {drivers or 'none'}; torch is built for {accelerator.build()}", fix)


def _gpus_together() -> Iterator[Fact]:
    if tried := try_gpus():
        yield Fact("GPUs together", *tried)


def _why_no_gpu(drivers: str) -> str:
    """Return why torch finds no GPU, and the fix; "" if there is no GPU driver, so presumably no GPU."""
    hidden = [f"{name}={os.environ[name]}" for name in accelerator.VISIBLE if os.environ.get(name) in ("", "-1")]
    if hidden:
        return f"{' and '.join(hidden)} hides all GPUs; to use them, unset {'it' if len(hidden) == 1 else 'them'}"
    if not drivers:
        return ""
    return f"torch finds no GPU ({accelerator.why_none() or 'reason unknown'}); install the torch build for your GPU"


def _backends() -> Fact:
    import torch.distributed as dist

    if not dist.is_available():
        return Fact("backends", "none", "this torch build lacks torch.distributed; install another build")
    return Fact("backends", ", ".join(accelerator.libraries()))


def _launcher() -> Fact:
    try:
        rank_info = RankInfo.from_environment()
    except WorldError as error:
        return Fact("launcher", "inconsistent variables", str(error))
    if rank_info.launcher == "none":
        return Fact("launcher", "none; start workers with lockstep train -np N, or torchrun")
    return Fact(
        "launcher", f"{rank_info.launcher}: rank {rank_info.rank} of {rank_info.size} workers, node {rank_info.node}"
    )


def _machine() -> Iterator[Fact]:
    import psutil
    import torch

    usable, total = usable_cores(), os.cpu_count()
    yield Fact("cores", f"{usable} usable of {total}; torch uses {torch.get_num_threads()} threads per worker")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None:
        fits = threads.isdigit() and int(threads) <= usable
        fix = "" if fits else f"more threads than cores slow training down; export OMP_NUM_THREADS={usable}"
        yield Fact("OMP_NUM_THREADS", threads, fix)
    memory = psutil.virtual_memory()
    low = "little memory left; stop other programs, or lower --batch-size" if memory.available < GIB else ""
    yield Fact("memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free", low)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = "" if limit >= MIN_OPEN_FILES else f"too few for loader processes; run ulimit -n {MIN_OPEN_FILES}"
    yield Fact("open files", f"at most {limit:,}", fix)


def _storage() -> Iterator[Fact]:
    folder = Path.cwd()
    free = shutil.disk_usage(folder).free
    fix = "" if free >= MIN_DISK_BYTES else "little space for checkpoints; choose another disk with --run-dir"
    if not os.access(folder, os.W_OK):
        fix = "this folder is not writable; change to another folder, or choose one with --run-dir"
    yield Fact("this folder", f"{free / GIB:.1f} GiB free in {folder}", fix)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        users, more = ("loader processes", "")
        if accelerator.count() > 1:  # NCCL takes up to 33 MB for a pair without direct access to each other's memory
            users, more = ("loader processes and NCCL", ", and set NCCL_SHM_DISABLE=1")
        small = f"too small for {users}; enlarge it (docker run --shm-size=2g), or add --workers 0{more}"
        yield Fact("/dev/shm", f"{free / GIB:.1f} GiB free", "" if free >= MIN_SHARED_MEMORY_BYTES else small)


def _loopback() -> Fact:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return Fact("loopback", "does not work", f"workers on one machine need 127.0.0.1, which failed: {error}")
    return Fact("loopback", "works")
