"""The fixture `names`: a machine with other names and addresses, and a name server that knows other hosts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.launch.plan.hosts import addresses_of

Know = Callable[[Mapping[str, str]], list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Know:
    """Return a function of the hosts' addresses by name, several after spaces; it returns the names asked for later.

    This machine is node7, with an Ethernet and an InfiniBand interface.
    """

    def know(hosts: Mapping[str, str]) -> list[str]:
        asked = list[str]()

        def look_up(name: str, *arguments: Any, **options: Any) -> list[Any]:
            asked.append(name)
            if name in hosts:
                return [found for part in hosts[name].split() for found in usual(part, *arguments, **options)]
            if not name.replace(".", "").isdigit():
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return usual(name, *arguments, **options)

        interfaces = {"eth0": ["10.0.0.7"], "ib0": ["10.1.0.7", "fe80::7%ib0"], "lo": ["127.0.0.1"]}
        kinds = (socket.AF_INET, socket.AF_INET6)
        found = {
            name: [SimpleNamespace(address=each, family=kinds[":" in each]) for each in own]
            for name, own in interfaces.items()
        }
        usual = socket.getaddrinfo
        changes: list[tuple[Any, str, Any]] = [
            (socket, "gethostname", lambda: "Node7"),
            (psutil, "net_if_addrs", lambda: found),
            (socket, "getaddrinfo", look_up),
        ]
        for module, name, function in changes:
            monkeypatch.setattr(module, name, function)
        addresses_of.cache_clear()
        return asked

    return know
