"""Choose the network interface for a worker's connections to its peers, per host.

By default, Gloo uses the address that the host's name resolves to, which may be loopback or in another network. On a
single host, this would needlessly open ports to the network.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store

    from lockstep.world.launcher_environment import RankInfo

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
AWAY = "lockstep/away"
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
EVERYWHERE = ""
VIRTUAL = ("docker", "virbr", "br-", "cni", "flannel", "podman", "veth")


def choose_interface(rank_info: RankInfo, store: Store, host: str) -> None:
    """Set GLOO_SOCKET_IFNAME, Gloo's network interface, unless it is set.

    Use loopback if all workers are on this machine, or if rank 0's address is loopback, as when several nodes are
    simulated on one machine; else the interface on the route to rank 0.

    Set NCCL's interface only with loopback; otherwise NCCL chooses, as it may use several.

    Args:
        host: Rank 0's host.

    Raises:
        OSError: There is no route to rank 0.
    """
    if GLOO in os.environ:
        return
    if rank_info.local_size == rank_info.size or is_loopback(host):
        os.environ[GLOO] = _interface(LOOPBACK)
        os.environ.setdefault(NCCL, os.environ[GLOO])
        return
    own = address_towards(host)
    if own.startswith("127."):  # on rank 0's host, whose name resolves to loopback: use the one towards another host
        own = address_towards(store.get(AWAY).decode())
    else:
        store.set(AWAY, own)
    os.environ[GLOO] = _interface(own)


def own_address(one_host: bool) -> str:
    """Return the address at which the other workers reach this host.

    This is the address of the interface in GLOO_SOCKET_IFNAME; else loopback if all workers are on one host; else the
    local address on the route to MASTER_ADDR, or another IPv4 address of this host if that is loopback.
    """
    interface = os.environ.get(GLOO, "").split(",")[0]
    if interface:
        infos = psutil.net_if_addrs().get(interface, [])
        found = [info.address for info in infos if info.family == socket.AF_INET]
        if not found:
            raise OSError(f"no network interface {interface!r} with an IPv4 address; fix GLOO_SOCKET_IFNAME")
        return found[0]
    if one_host:
        return LOOPBACK
    address = address_towards(os.environ.get("MASTER_ADDR") or socket.gethostname(), socket.AF_INET)
    if not address.startswith("127."):
        return address
    return next((other for _, other in addresses() if ":" not in other), address)


def addresses(only: Collection[str] = ()) -> list[tuple[str, str]]:
    """Return the (interface, address) pairs at which others may reach this host, the most likely first.

    Loopback, link-local addresses and interfaces that are down are left out; IPv6 and container bridges come last.

    Args:
        only: Names of the interfaces to consider; all if empty.
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
    """Whether a host name or address is loopback, which only workers on the same machine can use."""
    return host == "localhost" or host.startswith("127.")


def listening_address(host: str) -> str:
    """Return the address on which rank 0 listens if this machine is `host`; EVERYWHERE if it is unknown."""
    if is_loopback(host):
        return LOOPBACK
    means = [str(info[4][0]) for info in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    return reachable_address(means, addresses(os.environ[GLOO].split(",") if GLOO in os.environ else ()))


def reachable_address(means: Sequence[str], own: Sequence[tuple[str, str]]) -> str:
    """Return the one of this machine's (interface, address) pairs at which others find it; EVERYWHERE if unknown.

    This is the address that its name means. If that is loopback, as in Debian's /etc/hosts, other hosts resolve the
    name to another address: that of the interface in GLOO_SOCKET_IFNAME, or of the only interface.
    """
    named = [address for address in means if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    here = [address for _, address in own]
    if named:
        return next((address for address in named if address in here), named[0])
    return only_address(own)


def only_address(own: Sequence[tuple[str, str]]) -> str:
    """Return the address of the only interface, ignoring container bridges; EVERYWHERE for several or none."""
    only = only_interface(own)
    return next(address for name, address in own if name == only) if only else EVERYWHERE


def only_interface(own: Sequence[tuple[str, str]]) -> str:
    """Return the only interface of (interface, address) pairs, ignoring container bridges; "" for several or none."""
    interfaces = {name for name, _ in own if not name.startswith(VIRTUAL)}
    return interfaces.pop() if len(interfaces) == 1 else ""


def address_towards(host: str, family: int = socket.AF_UNSPEC) -> str:
    """Return this machine's address on the route to a host. Nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str:
    """Return the interface with this address; "" if there is none."""
    for name, infos in psutil.net_if_addrs().items():
        if any(info.address.partition("%")[0] == address for info in infos):
            return name
    return ""


def _interface(address: str) -> str:
    name = interface_of(address)
    if not name:
        raise OSError(f"no network interface has the address {address}")
    return name
