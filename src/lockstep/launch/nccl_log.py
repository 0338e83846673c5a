"""Which network NCCL or RCCL really uses, from its own log (NCCL_DEBUG=INFO), and what is wrong with it.

Formats: NCCL 2.20 to 2.30 (src/bootstrap.cc, src/misc/socket.cc, src/plugin/net.cc, src/transport/net_ib and
net_socket.cc at the tags v2.20.3-1, v2.23.4-1, v2.26.2-1 and v2.28.3-1; texts of the library 2.30.7) and aws-ofi-nccl
(src/nccl_ofi_net.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.world.interfaces import VIRTUAL

LINE = re.compile(r"(?P<host>[\w.-]+):\d+:\d+ \[\d+\] .*?NCCL (?:INFO|WARN) (?P<text>.*)")
VERSION = re.compile(r"(?:NCCL|RCCL) version\s*:? ?(\d[\w.+-]*)")
NETWORK = re.compile(r"Using network (.+?)\s*$")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using ([^\s:]+):")
SOCKETS = re.compile(r"NET/Socket : Using (.*)")
OUT_OF_BAND = re.compile(r"OOB ([^\s:]+):")
NUMBERED = re.compile(r"\[\d+\]([^\s:]+):")
PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([^\s,]+)")
SLOW_PROVIDERS = ("tcp", "sockets", "udp", "net")
# A line of the log, and what it means.
FAULTS = (
    (
        re.compile(r"no (?:socket |IP |usable listening )?interface found", re.IGNORECASE),
        "found no usable interface; set --interface to one that exists",
    ),
    (
        re.compile(r"network (.+) not found"),
        "has no network {0}, which NCCL_NET demands; load the site's plugin module, or unset NCCL_NET",
    ),
    (
        re.compile(r"Failed to find ncclNetPlugin symbol|External network plugin (?:.+) is unsupported"),
        "found a plugin that is too old or too new for this NCCL; install one for its version",
    ),
    (
        re.compile(r"Failed to initialize NET plugin (?!IB|Socket)(.+?)\s*$"),
        "could not initialize the plugin {0}; its lines above say why",
    ),
    (
        re.compile(r"NET/OFI (?:No eligible providers were found|Couldn't open a fabric provider)"),
        "has a plugin without a usable libfabric provider; load the site's libfabric",
    ),
    (re.compile(r"disabling GDR"), "copies through the CPU, because the plugin disabled GPUDirect; update libfabric"),
    (re.compile(r"Failed to initialize any NET plugin"), "could not initialize any network"),
)


@dataclass(frozen=True)
class NetworkInUse:
    """What a log says: the version, networks, interfaces and libfabric providers, and what is wrong."""

    version: str
    networks: tuple[str, ...]
    interfaces: tuple[str, ...]
    providers: tuple[str, ...]
    faults: tuple[str, ...]

    def describe(self) -> str:
        """Return all but the faults on one line."""
        parts = (("network", self.networks), ("interface", self.interfaces), ("provider", self.providers))
        named = [f"{what} {', '.join(names) or 'not named'}" for what, names in parts]
        return f"{'; '.join(named)}; NCCL {self.version or 'of unknown version'}"


def read_nccl_log(lines: Iterable[str], plugin: Sequence[str] = (), interfaces: Sequence[str] = ()) -> NetworkInUse:
    """Return the network in a log of one or several workers.

    Args:
        plugin: The names of the plugin that the site documents; empty if it documents none.
        interfaces: The interfaces that the site documents; empty for any.
    """
    version = ""
    networks, providers, used, faults = dict[str, None](), dict[str, None](), dict[str, None](), dict[str, None]()
    for line in lines:
        if found := VERSION.search(line):
            version = found[1]
        match = LINE.search(line)
        if not match:
            continue
        text, host = match["text"], match["host"]
        if found := NETWORK.search(text):
            networks[found[1]] = None
        for pattern in (BOOTSTRAP, OUT_OF_BAND):
            used |= dict.fromkeys(pattern.findall(text))
        if found := SOCKETS.search(text):
            used |= dict.fromkeys(NUMBERED.findall(found[1]))
        if found := PROVIDER.search(text):
            providers[found[1]] = None
        for pattern, meaning in FAULTS:
            if found := pattern.search(text):
                faults[f"NCCL on {host} {meaning.format(*found.groups())}"] = None
    faults |= dict.fromkeys(_wrong(list(networks), list(used), list(providers), plugin, interfaces, bool(faults)))
    return NetworkInUse(version, tuple(networks), tuple(used), tuple(providers), tuple(faults))


def _wrong(
    networks: Sequence[str],
    used: Sequence[str],
    providers: Sequence[str],
    plugin: Sequence[str],
    interfaces: Sequence[str],
    explained: bool,
) -> list[str]:
    """Return what is wrong with the log as a whole; `explained`: a line has already named the cause."""
    faults = []
    if not (networks or explained):
        faults.append("the log names no network; run the job with NCCL_DEBUG=INFO")
    if len(networks) > 1:
        faults.append(f"the workers use different networks: {', '.join(networks)}; give all nodes the same plugin")
    elif networks and plugin and networks[0] not in plugin and not explained:
        fix = "load the site's plugin module, and check LD_LIBRARY_PATH"
        faults.append(f"NCCL uses the network {networks[0]} instead of {' or '.join(plugin)}; {fix}")
    slow = [name for name in providers if name.split(";")[0] in SLOW_PROVIDERS]
    if slow:
        faults.append(f"the plugin uses the libfabric provider {slow[0]}; set FI_PROVIDER to the network's own")
    for name in used:
        if interfaces and not name.startswith(tuple(interfaces)):
            faults.append(f"NCCL uses the interface {name} instead of {', '.join(interfaces)}; add --interface")
        elif not interfaces and name.startswith(("lo", *VIRTUAL)):
            faults.append(f"NCCL uses the interface {name}, which reaches no other host; add --interface NAME")
    return faults
