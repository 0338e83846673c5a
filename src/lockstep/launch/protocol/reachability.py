"""Find the first host's addresses that the other hosts of a job can reach, and through which of their interfaces.

The first host listens on each of its addresses and proves there that it has the job's secret; the others try all
addresses. So interfaces may have different names on each host, and an address that belongs to another machine there,
such as that of a container bridge, is detected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

CHALLENGE_BYTES = 16


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on one address; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


class Listeners:
    """A listening socket on each address, which answers challenges until one of them is taken.

    Args:
        seconds: Time limit for each connection.
    """

    def __init__(self, secret: str, hosts_addresses: Sequence[tuple[str, str]], seconds: float) -> None:
        self._secret = secret
        self._seconds = seconds
        self._sockets: dict[str, socket.socket] = {}
        self._servers: list[asyncio.Server] = []
        for _, address in hosts_addresses:
            with suppress(OSError):  # an address that cannot be bound is not reachable either
                self._sockets[address] = listen(address)

    @property
    def open(self) -> dict[str, int]:
        """The listening addresses and their ports."""
        return {address: each.getsockname()[1] for address, each in self._sockets.items()}

    async def answer(self) -> None:
        """Start to answer challenges on all addresses."""
        for each in self._sockets.values():
            self._servers.append(await asyncio.start_server(self._answer, sock=each.dup()))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(self._seconds):
                writer.write(proof(self._secret, "door", await reader.readexactly(CHALLENGE_BYTES)))
                await writer.drain()
        writer.close()

    def take(self, address: str) -> socket.socket:
        """Return the socket of one address and close the others."""
        for server in self._servers:
            server.close()
        taken = self._sockets.pop(address)
        for other in self._sockets.values():
            other.close()
        return taken


def proof(secret: str, role: str, challenge: bytes = b"") -> bytes:
    """Return a proof of the secret for a role and a challenge, which does not reveal the secret."""
    return hmac.digest(secret.encode(), b"lockstep " + role.encode() + b"\0" + challenge, "sha256")


async def reachable(listeners: dict[str, int], secret: str, seconds: float) -> dict[str, str]:
    """Return the addresses of another host that answer, each with the local address of the connection to it."""
    ways = await asyncio.gather(*(_knock(address, port, secret, seconds) for address, port in listeners.items()))
    return {address: way for address, way in zip(listeners, ways, strict=True) if way}


async def _knock(address: str, port: int, secret: str, seconds: float) -> str:
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    expected = proof(secret, "door", challenge)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address, port)
            own: str = writer.get_extra_info("sockname")[0]
            writer.write(challenge)
            answer = await reader.readexactly(len(expected))
            writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return ""
    return own if hmac.compare_digest(answer, expected) else ""
