"""Lines between manually started nodes, each with an HMAC that shows its sender, its connection and its position.

A line that is recorded, repeated, left out, moved, reflected or changed is an error. Lines are not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from dataclasses import dataclass

from lockstep.launch.protocol.messages import MessageError
from lockstep.launch.protocol.reachability import proof

COUNT_BYTES = 8


class Seal:
    """The HMACs of the lines in one direction of a connection.

    Args:
        key: Known to both ends, for this direction of this connection; without one, lines have no HMAC.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def add(self, line: bytes) -> bytes:
        """Return the line with its HMAC."""
        return self._next(line) + line

    def remove(self, line: bytes) -> bytes:
        """Return the line without its HMAC.

        Raises:
            MessageError: The HMAC is not that of the next line.
        """
        plain = line.partition(b" ")[2] if self._key else line
        if not hmac.compare_digest(self._next(plain), line[: len(line) - len(plain)]):
            raise MessageError("a line was changed between the nodes, or comes from another program")
        return plain

    def _next(self, line: bytes) -> bytes:
        if not self._key:
            return b""
        counted = self._count.to_bytes(COUNT_BYTES) + line
        self._count += 1
        return hmac.digest(self._key, counted, "sha256").hex().encode() + b" "


@dataclass(frozen=True)
class Seals:
    """One end's seals of a connection."""

    outgoing: Seal
    incoming: Seal

    @classmethod
    def of(cls, secret: str, own: int, peer: int, challenges: bytes) -> Seals:
        """Return those of node `own` for its connection to another; the challenges are new for each connection."""

        def key(sender: int, receiver: int) -> bytes:
            return proof(secret, f"lines of node {sender} to node {receiver}", challenges) if secret else b""

        return cls(Seal(key(own, peer)), Seal(key(peer, own)))


class SealedLines:
    """A connection that carries such lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seals: Seals) -> None:
        self._reader = reader
        self._seals = seals
        self.writer = writer

    async def readline(self) -> bytes:
        """Return the next line; empty at the end, or if the connection breaks.

        Raises:
            MessageError: As for `Seal.remove`.
        """
        line = b""
        with suppress(OSError):
            line = await self._reader.readline()
        return self._seals.incoming.remove(line) if line else b""

    def send(self, line: bytes) -> None:
        """Send a line, unless the connection is closed."""
        if not self.writer.is_closing():
            self.writer.write(self._seals.outgoing.add(line))
