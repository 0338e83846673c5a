"""The network interface through which a worker's connections to its peers go; each host has its own.

Left to themselves Gloo takes the address of the host's name, which may be another network's or loopback's, and on one
host opens ports to the network that nobody needs.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import psutil

from lockstep.place import Place
from lockstep.store import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
AWAY = "lockstep/away"


def choose_interface(place: Place, store: Store, host: str) -> None:
    """Tell Gloo its interface, unless somebody has: loopback if all workers are here, else the one towards rank 0.

    NCCL is told where all workers are here; else it knows better, as it may use several.

    Args:
        host: Rank 0's.

    Raises:
        OSError: There is no way to rank 0.
    """
    if GLOO in os.environ:
        return
    if place.local_size == place.size:
        os.environ[GLOO] = _interface(LOOPBACK)
        os.environ.setdefault(NCCL, os.environ[GLOO])
        return
    own = address_towards(host)
    if own.startswith("127."):  # rank 0's own host, whose name means loopback there: take the way to the other hosts
        own = address_towards(store.get(AWAY).decode())
    else:
        store.set(AWAY, own)
    os.environ[GLOO] = _interface(own)


def address_towards(host: str) -> str:
    """This machine's address on the way to a host; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str:
    """The interface that has an address of this machine; "" where none has."""
    for name, infos in psutil.net_if_addrs().items():
        if any(info.address.partition("%")[0] == address for info in infos):
            return name
    return ""


def _interface(address: str) -> str:
    name = interface_of(address)
    if not name:
        raise OSError(f"no network interface has the address {address}")
    return name
