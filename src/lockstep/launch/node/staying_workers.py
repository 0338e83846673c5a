"""The node process's connections to the workers of this host that stay when others are lost.

The other side is `lockstep.world.generations`. Any process of this host could connect, so each proves that it has the
secret in its variables.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lockstep.files.untrusted import parse_json
from lockstep.world import MemberState
from lockstep.world.interfaces import LOOPBACK

INTRODUCTION_SECONDS = 5.0


@dataclass
class _Connection:
    """A worker's connection.

    Args:
        must_lead: Rank 0 of the next generation has to be a worker that stays.
        joined: How many generations it has joined later.
    """

    writer: asyncio.StreamWriter
    must_lead: bool
    state: MemberState = MemberState.STAYS
    joined: int = 0

    def send(self, message: Mapping[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


class StayingWorkers:
    """The workers that stay, by their numbers.

    Args:
        changed: Set whenever a worker says something.
    """

    def __init__(self, changed: asyncio.Event) -> None:
        self.numbers = itertools.count()  # a number is never reused
        self._changed = changed
        self._lines: dict[int, _Connection] = {}
        self._changes: list[Mapping[str, Any]] = []  # of the hosts, since this generation began
        self.have_state = False  # whether rank 0 of the next generation had to be a worker of this one
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin a generation; listen for workers, if this does not listen yet."""
        self._changes = []
        self.have_state = any(line.must_lead for line in self._lines.values())
        self._server = self._server or await asyncio.start_server(self._serve, LOOPBACK, 0)

    def close(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.close()

    def address_for(self, number: int) -> str:
        """Return what a worker needs to connect."""
        assert self._server
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}:{self._secret}:{number}"

    def state(self, number: int) -> MemberState:
        """Return the state of a worker."""
        return self._lines[number].state if number in self._lines else MemberState.ENDS

    def must_lead(self, number: int) -> bool:
        return number in self._lines and self._lines[number].must_lead

    def passes_notices(self, number: int) -> bool:
        """Whether a worker, from an earlier generation, passes signals on to the others."""
        return number in self._lines and self._lines[number].joined > 0 and not self._lines[number].must_lead

    @property
    def has_lost_peer(self) -> bool:
        """Whether a worker has lost the connection to a peer in this generation."""
        return any(line.state in (MemberState.CUT_OFF, MemberState.WAITS) for line in self._lines.values())

    def answer(self, number: int, variables: Mapping[str, str]) -> None:
        """Let a worker that waits continue with these variables; without any, it exits."""
        line = self._lines[number]
        line.state, line.joined = MemberState.STAYS, line.joined + 1
        line.send({"variables": dict(variables)})

    def tell(self, news: Mapping[str, Any]) -> None:
        """Send to all workers that stay: {"over": True} of their generation, or a {"change": KIND} of the hosts."""
        if "change" in news:  # workers that connect later are notified, too
            self._changes.append(news)
        for line in self._lines.values():
            if "over" in news:
                line.state = max(line.state, MemberState.LEAVES)
            line.send(news)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = None
        try:
            # Cancelled at the end of this process, where asyncio would otherwise print a traceback.
            with suppress(OSError, ValueError, TimeoutError, LookupError, TypeError, asyncio.CancelledError):
                hello = parse_json(await asyncio.wait_for(reader.readline(), INTRODUCTION_SECONDS))
                if not secrets.compare_digest(str(hello["secret"]), self._secret):
                    return
                if int(hello["worker"]) in self._lines:  # a process that the worker has started has its variables, too
                    return
                number = int(hello["worker"])
                line = self._lines[number] = _Connection(writer, bool(hello["must_lead"]))
                self.have_state |= line.must_lead
                for change in self._changes:
                    line.send(change)
                while text := await reader.readline():
                    line.state = max(line.state, MemberState[parse_json(text)["state"]])
                    self._changed.set()
        finally:
            if number is not None:
                del self._lines[number]
            writer.close()
            self._changed.set()
