"""Hosts and their slots, from -H, a host file, or the output of a discovery script."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.errors import ConfigError, require

# A name, or an IPv6 address, in brackets if ":N" follows it.
HOST_LINE = re.compile(
    r"(?:\[(?P<address>\S+)\]|(?P<name>[^\s:]+|(?!\[)\S*:\S*:\S*))"
    r"(?:(?::|\s+slots\s*=\s*)(?P<slots>\d{1,9}))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)
LINE_FORMS = "`host slots=N` or `host:N`"
BYTE_ORDER_MARK = "\ufeff"  # at the start of files from Windows
# Also user@host and addresses, but nothing that ssh or a shell would interpret, such as a leading dash.
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9.\-_:\[\]@]{1,255}")


@dataclass(frozen=True)
class Host:
    """A host and its number of slots for workers.

    Raises:
        ConfigError: The name has invalid characters.
    """

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.name):
            raise ConfigError(
                f"invalid host name {self.name[:100]!r}: use letters, digits and .-_:[]@, without a dash at the "
                f"start; fix -H, the host file or the discovery script"
            )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse "a:4,b:2"; a host without a number has one slot.

    Raises:
        ConfigError: A part is not a host.
    """
    return tuple(_host(part, 1, "-H") for part in text.split(","))


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Parse lines of "host slots=N", as for mpirun, or "host:N", as for Hydra.

    A host without a number has one slot, and "#" starts a comment.

    Raises:
        ConfigError: A line is not a host, or there are no hosts.
    """
    hosts = []
    for line in _lines(text):
        match = HOST_LINE.fullmatch(line)
        if not match:
            raise ConfigError(f"--hostfile: {line!r} is not a line of the form {LINE_FORMS}")
        hosts.append(Host(match["name"] or match["address"], int(match["slots"] or 1)))
    if not hosts:
        raise ConfigError(f"--hostfile contains no host; write lines of the form {LINE_FORMS}")
    return tuple(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a host file.

    Raises:
        ConfigError: It cannot be read, a line is not a host, or there are no hosts.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    return parse_hostfile(text)


def parse_discovered(text: str, slots_per_host: int | None) -> tuple[Host, ...]:
    """Parse a discovery script's lines "host:slots", or "host" if `slots_per_host` is given.

    Raises:
        ConfigError: A line is not a host.
    """
    return tuple(_host(line, slots_per_host, "--host-discovery-script") for line in _lines(text))


def slots_of(hosts: Sequence[Host]) -> int:
    """Return the total number of slots."""
    return sum(host.slots for host in hosts)


def first_slots(hosts: Sequence[Host], workers: int) -> tuple[Host, ...]:
    """Return the first slots, in the order of hosts, without hosts that are not needed.

    Raises:
        ConfigError: There are fewer slots, or `workers` is less than 1.
    """
    require(workers >= 1, "-np", workers, "at least 1")
    slots = slots_of(hosts)
    if workers > slots:
        raise ConfigError(f"-np {workers}, but the hosts have {slots} slots; raise host:slots, or lower -np")
    taken: list[Host] = []
    for host in hosts:
        left = workers - slots_of(taken)
        if left > 0:
            taken.append(Host(host.name, min(host.slots, left)))
    return tuple(taken)


def slots_here(hosts: Sequence[Host], names: Collection[str]) -> int:
    """Return the number of slots of this machine, under any of its `names`.

    Raises:
        ConfigError: A host is another machine.
    """
    others = [host.name for host in hosts if host.name.lower() not in names]
    if others:
        raise ConfigError(
            f"{', '.join(others)} is not this machine ({socket.gethostname()}): an elastic job that starts on one "
            f"machine stays on it; to use other hosts, start with them"
        )
    return slots_of(hosts)


def are_here(hosts: Sequence[Host], names: Collection[str]) -> bool:
    """Whether all hosts are this machine, under any of its `names`."""
    return all(host.name.lower() in names for host in hosts)


def names_of_this_machine() -> frozenset[str]:
    """Return this machine's host names and addresses, in lower case, without a DNS lookup."""
    name = socket.gethostname().lower()
    addresses = {address.address.lower() for each in psutil.net_if_addrs().values() for address in each}
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0], *addresses})


def _host(text: str, default: int | None, flag: str) -> Host:
    name, colon, slots = text.strip().rpartition(":")
    if not colon:
        name = slots
        if default is None:
            raise ConfigError(f"{flag}: {name!r} has no number of slots; use host:slots or add --slots-per-host")
        slots = str(default)
    if not name or not slots.isdecimal() or len(slots) > 9:
        raise ConfigError(f"{flag}: {text.strip()!r} is not of the form host:slots")
    return Host(name.strip("[]"), int(slots))


def _lines(text: str) -> list[str]:
    stripped = (line.partition("#")[0].strip() for line in text.removeprefix(BYTE_ORDER_MARK).splitlines())
    return [line for line in stripped if line]
