"""Hosts and their slots, as `horovodrun` is told them: -H, a host file, or the lines of a discovery script."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.errors import ConfigError, require

HOST_LINE = re.compile(r"(?P<name>\S+?)(?:\s+slots\s*=\s*(?P<slots>\d{1,9}))?(?:\s+max[-_]slots\s*=\s*\d+)?")
# Also user@host and addresses. What else ssh or a shell would obey, such as a leading dash, is in no host's name.
HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9.\-_:\[\]@]{1,255}")


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it takes.

    Raises:
        ConfigError: The name has characters that no host name has.
    """

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.name):
            raise ConfigError(
                f"invalid host name {self.name[:100]!r}: names have letters, digits and .-_:[]@, and do not start with "
                f"a dash; fix -H, the host file or the discovery script"
            )


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read "a:4,b:2"; a host without a number has one slot.

    Raises:
        ConfigError: A part is no host.
    """
    return tuple(_host(part, 1, "-H") for part in text.split(","))


def parse_hostfile(text: str) -> tuple[Host, ...]:
    """Read lines of "host slots=N"; a host without a number has one slot, and "#" begins a comment.

    Raises:
        ConfigError: A line is no host, or there is none.
    """
    hosts = []
    for line in _lines(text):
        match = HOST_LINE.fullmatch(line)
        if not match:
            raise ConfigError(f"--hostfile: {line!r} is not a line of the form `host slots=N`")
        hosts.append(Host(match["name"], int(match["slots"] or 1)))
    if not hosts:
        raise ConfigError("--hostfile names no host; it has lines of the form `host slots=N`")
    return tuple(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a host file.

    Raises:
        ConfigError: It cannot be read, a line is no host, or there is none.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hostfile {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    return parse_hostfile(text)


def parse_discovered(text: str, slots_per_host: int | None) -> tuple[Host, ...]:
    """Read a discovery script's lines "host:slots", or "host" where `slots_per_host` says how many slots.

    Raises:
        ConfigError: A line is no host.
    """
    return tuple(_host(line, slots_per_host, "--host-discovery-script") for line in _lines(text))


def slots_of(hosts: Sequence[Host]) -> int:
    """How many workers they take in all."""
    return sum(host.slots for host in hosts)


def first_slots(hosts: Sequence[Host], workers: int) -> tuple[Host, ...]:
    """The first slots, in the order of hosts; hosts that are not needed are left out.

    Raises:
        ConfigError: There are not as many, or none is asked for.
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
    """How many slots this machine has, by any of its `names`.

    Raises:
        ConfigError: A host is another machine.
    """
    others = [host.name for host in hosts if host.name.lower() not in names]
    if others:
        raise ConfigError(
            f"{', '.join(others)} is not this machine ({socket.gethostname()}): an elastic job that begins on one "
            f"machine stays there; name another host from the beginning"
        )
    return slots_of(hosts)


def are_here(hosts: Sequence[Host], names: Collection[str]) -> bool:
    """Whether this machine, by any of its `names`, is the only host, or none is named."""
    return all(host.name.lower() in names for host in hosts)


def names_of_this_machine() -> frozenset[str]:
    """Host names and addresses that mean this machine, in lower case; no name server is asked."""
    name = socket.gethostname().lower()
    addresses = {address.address.lower() for each in psutil.net_if_addrs().values() for address in each}
    return frozenset({"localhost", "127.0.0.1", "::1", name, name.partition(".")[0], *addresses})


def _host(text: str, default: int | None, flag: str) -> Host:
    name, colon, slots = text.strip().rpartition(":")
    if not colon:
        name = slots
        if default is None:
            raise ConfigError(f"{flag}: {name!r} has no number of slots; write host:slots or add --slots-per-host")
        slots = str(default)
    if not name or not slots.isdecimal() or len(slots) > 9:
        raise ConfigError(f"{flag}: {text.strip()!r} is not of the form host:slots")
    return Host(name.strip("[]"), int(slots))


def _lines(text: str) -> list[str]:
    stripped = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in stripped if line]
