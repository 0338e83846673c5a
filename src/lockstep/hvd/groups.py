"""Process groups of some workers, outside torch.distributed's registry, which scripts may use for themselves."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from functools import cache
from typing import Any

import psutil
import torch.distributed as dist

from lockstep.errors import WorldError, first_line
from lockstep.store import LOOPBACK


def gloo_group(store: dist.Store, rank: int, size: int, timeout_seconds: float, one_host: bool) -> Any:
    """Connect `size` workers, each of which calls this with the same store.

    Args:
        one_host: Whether all workers of the job are on this host, so that no port need be open beyond loopback.

    Raises:
        WorldError: A peer cannot be reached within the time.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        options._devices = [_gloo_device(own_address(one_host))]
        return dist.ProcessGroupGloo(store, rank, size, options)
    except (RuntimeError, OSError) as error:
        raise WorldError(
            f"worker {rank} on {socket.gethostname()} cannot connect to its peers: {first_line(error)}; "
            f"GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error


def own_address(one_host: bool) -> str:
    """The address of this host under which the other workers reach it.

    That of the interface that GLOO_SOCKET_IFNAME names; else loopback where all workers are on one host; else that of
    the way to MASTER_ADDR or, on that host itself, its name's.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        addresses = psutil.net_if_addrs().get(interface, [])
        found = [address.address for address in addresses if address.family == socket.AF_INET]
        if not found:
            raise OSError(f"there is no network interface {interface!r} with an IPv4 address")
        return found[0]
    if one_host:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))
        address: str = probe.getsockname()[0]
    if not address.startswith("127."):
        return address
    others = [
        info.address for infos in psutil.net_if_addrs().values() for info in infos if info.family == socket.AF_INET
    ]
    return next((other for other in others if not other.startswith("127.")), address)


@cache  # each has a thread of its own
def _gloo_device(address: str) -> Any:
    return dist.ProcessGroupGloo.create_device(hostname=address)
