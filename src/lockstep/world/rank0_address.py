"""Find rank 0 of a job on several hosts, from the variables of its launcher and batch system.

All workers must find the same address without communicating, so it is derived from variables that are the same for all.
Rank 0 checks that it runs there. docs/reference/launchers.md has the table.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Mapping
from pathlib import Path

import psutil

from lockstep.errors import WorldError
from lockstep.files.untrusted import read_text
from lockstep.world.batch_job import flux_hosts
from lockstep.world.interfaces import LOOPBACK
from lockstep.world.launcher_environment import ADDRESS, FLUX, KUBEFLOW, SLURM, TRAIN_JOB_ADDRESS, RankInfo
from lockstep.world.slurm_hostlist import expand

HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
OPEN_MPI_ADDRESS = "OMPI_MCA_orte_hnp_uri"  # mpirun's address, up to Open MPI 4
OPEN_MPI_JOB = "PMIX_NAMESPACE"  # since Open MPI 5: prterun-HOST-PID@N, with mpirun's host
# Variables that identify a launch, the same in all its workers (Open MPI's remote ones may lack the batch job's).
LAUNCHES = {
    SLURM.name: ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    "Open MPI": ("OMPI_MCA_ess_base_jobid", OPEN_MPI_JOB),
    FLUX.name: ("FLUX_JOB_ID",),
}
BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PALS_APID")
PORTS = range(20_000, 30_000)  # below Linux's ephemeral ports


def find_address(rank_info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port at which rank 0 serves the job's store.

    MASTER_ADDR and MASTER_PORT each override the derived value, but a job on one host always uses loopback.

    Raises:
        WorldError: Rank 0's host is unknown, or MASTER_PORT is not a port.
    """
    if rank_info.launcher == KUBEFLOW:
        names = zip(ADDRESS, TRAIN_JOB_ADDRESS, strict=True)
        environment = {to: environment[name] for to, name in names if name in environment} | dict(environment)
    if rank_info.local_size == rank_info.size:
        host: str | None = LOOPBACK
    else:
        host = environment.get("MASTER_ADDR") or _first_host(rank_info, environment) or _ask_mpi(rank_info)
    if host is None:
        raise WorldError(
            f"{rank_info.launcher} does not set rank 0's address; set MASTER_ADDR (the host of rank 0) and MASTER_PORT "
            f"(a free port there) for all workers, for example with mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500"
        )
    port = environment.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and len(port) < 9 and 0 < int(port) < 65_536):
        raise WorldError(f"MASTER_PORT={port[:40]!r} is not a port; set it to a free one of {host}, or unset it")
    return host, int(port) if port else derived_port(launch_name(rank_info, environment))


def launch_name(rank_info: RankInfo, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name that only this launch's workers share, as far as the variables identify the launch."""
    names = LAUNCHES.get(rank_info.launcher, BATCH_JOBS)
    return " ".join([rank_info.launcher, *(f"{name}={environment[name]}" for name in names if name in environment)])


def derived_port(launch: str) -> int:
    """Return the port of a launch: 20000 + CRC-32 of its name modulo 10000."""
    return PORTS[zlib.crc32(launch.encode(errors="backslashreplace")) % len(PORTS)]


def is_here(host: str) -> bool:
    """Whether a host name or address resolves to this machine."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _first_host(rank_info: RankInfo, environment: Mapping[str, str]) -> str | None:
    if rank_info.launcher == FLUX.name:
        try:
            return next(iter(flux_hosts(environment)), None)
        except ValueError as error:
            raise WorldError(f"{error}; set MASTER_ADDR to the host of rank 0") from None
    nodes = "SLURM_STEP_NODELIST" if rank_info.launcher == SLURM.name else "SLURM_JOB_NODELIST"
    if text := environment.get(nodes):
        try:
            return expand(text)[0]
        except ValueError as error:
            raise WorldError(f"invalid {nodes}: {error}; set MASTER_ADDR to the host of rank 0") from None
    if addresses := re.findall(r"tcp://([\d.,]+):", environment.get(OPEN_MPI_ADDRESS, "")):
        return _nearest(addresses[0].split(","))
    if job := re.fullmatch(r"prterun-(.+)-\d+@\d+", environment.get(OPEN_MPI_JOB, "")):
        return job[1]
    for name in HOST_FILES:
        if path := environment.get(name):
            return _first_line(name, Path(path))
    return None


def _nearest(addresses: list[str]) -> str:
    """Return the first address in a network of this machine; the first address if there is none."""
    infos = [info for infos in psutil.net_if_addrs().values() for info in infos if info.family == socket.AF_INET]
    networks = [ipaddress.ip_network(f"{info.address}/{info.netmask}", strict=False) for info in infos if info.netmask]
    near = (address for address in addresses if any(_is_in(address, network) for network in networks))
    return next(near, addresses[0])


def _is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:  # such as "1.2.3" in a damaged variable
        return False


def _first_line(name: str, path: Path) -> str:
    try:
        hosts = read_text(path).split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WorldError(
            f"{name}={path} cannot be read on {socket.gethostname()} ({reason}); set MASTER_ADDR (the host of "
            f"rank 0) and MASTER_PORT (a free port there) for all workers"
        ) from None
    if not hosts:
        raise WorldError(f"{name}={path} contains no host; set MASTER_ADDR to the host of rank 0")
    return hosts[0]


def _ask_mpi(rank_info: RankInfo) -> str | None:
    """Ask mpi4py for rank 0's host, if it is installed and belongs to the MPI that started this worker."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # RuntimeError: no MPI library
        return None
    world = MPI.COMM_WORLD
    if world.Get_size() != rank_info.size or world.Get_rank() != rank_info.rank:
        return None
    host: str = world.bcast(socket.gethostname(), root=0)
    return host
