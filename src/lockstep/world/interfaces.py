"""The network interface through which a worker's connections to its peers go; each host has its own.

Left to themselves Gloo takes the address of the host's name, which may be another network's or loopback's, and on one
host opens ports to the network that nobody needs.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import psutil

from lockstep.world.launcher_environment import Place
from lockstep.world.store import EVERYWHERE, LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
AWAY = "lockstep/away"
VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel", "podman", "veth")


def choose_interface(place: Place, store: Store, host: str) -> None:
    """Tell Gloo its interface, unless somebody has: loopback if all workers are here, else the one towards rank 0.

    They are where they meet at a loopback address, too, as when several nodes are tried on one machine.

    NCCL is told where all workers are here; else it knows better, as it may use several.

    Args:
        host: Rank 0's.

    Raises:
        OSError: There is no way to rank 0.
    """
    if GLOO in os.environ:
        return
    if place.local_size == place.size or is_loopback(host):
        os.environ[GLOO] = _interface(LOOPBACK)
        os.environ.setdefault(NCCL, os.environ[GLOO])
        return
    own = address_towards(host)
    if own.startswith("127."):  # rank 0's own host, whose name means loopback there: take the way to the other hosts
        own = address_towards(store.get(AWAY).decode())
    else:
        store.set(AWAY, own)
    os.environ[GLOO] = _interface(own)


def own_address(one_host: bool) -> str:
    """The address of this host under which the other workers reach it.

    That of the interface that GLOO_SOCKET_IFNAME names; else loopback where all workers are on one host; else that of
    the way to MASTER_ADDR or, on that host itself, its name's.
    """
    interface = os.environ.get(GLOO, "").split(",")[0]
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


def addresses(only: Collection[str] = ()) -> list[tuple[str, str]]:
    """This host's (interface, address) pairs by which others may reach it: the likeliest first.

    Loopback, link-local addresses and interfaces that are down are left out; IPv6 and containers' bridges come last.

    Args:
        only: The names of the interfaces to look at; empty: all.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = []
    for name, each in psutil.net_if_addrs().items():
        for entry in each:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or name not in up or (only and name not in only):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (address.is_loopback or address.is_link_local):
                found.append((address.version, name, str(address)))
    found.sort(key=lambda item: (item[1].startswith(VIRTUAL), item[0]))
    return [(name, address) for _, name, address in found]


def is_loopback(host: str) -> bool:
    """Whether a host is given by a name or address that only workers of the same machine can use."""
    return host == "localhost" or host.startswith("127.")


def listening_address(host: str) -> str:
    """Where rank 0 listens, and its host's other workers find it, if this machine is `host`; EVERYWHERE if unknown.

    The address that the name means, unless that is loopback, as Debian has it in /etc/hosts: the others know the name
    by another address then, which is that of GLOO_SOCKET_IFNAME's interface, or of the only one that there is.
    """
    if is_loopback(host):
        return LOOPBACK
    means = [str(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    named = [address for address in means if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    own = addresses(os.environ[GLOO].split(",") if GLOO in os.environ else ())
    here = [address for _, address in own]
    if named:
        return next((address for address in named if address in here), named[0])
    return only_address(own)


def only_address(own: Sequence[tuple[str, str]]) -> str:
    """The address of the only interface, containers' bridges aside; EVERYWHERE where there are several or none."""
    only = only_interface(own)
    return next(address for name, address in own if name == only) if only else EVERYWHERE


def only_interface(own: Sequence[tuple[str, str]]) -> str:
    """The only interface among (interface, address) pairs, containers' bridges aside; "" for several or none."""
    interfaces = {name for name, _ in own if not name.startswith(VIRTUAL)}
    return interfaces.pop() if len(interfaces) == 1 else ""


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
