"""How the nodes of a manually started job recognize each other before they exchange anything else.

Three messages, in turn: the node's number and challenge; the first node's proof and challenge; the node's proof and
what it brings. Each proof covers both challenges and names its sender and receiver, so a recorded or reflected proof
is worthless. Without a secret the proofs are empty, and the third message still shows that the node is connected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import LockstepError
from lockstep.launch.plan import SECRET
from lockstep.launch.reach import CHALLENGE_BYTES, proof
from lockstep.launch.wire import LIMIT_BYTES, PROTOCOL, pack
from lockstep.untrusted import parse_json, printable

UNPROVEN_BYTES = 1 << 10  # of one message; a host name takes at most 255
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class MeetingError(LockstepError):
    """This node cannot join the job's other nodes."""


class StrangerError(Exception):
    """The peer is not a node of this job; the text, if any, helps to find out why the nodes do not meet."""


@dataclass(frozen=True)
class Newcomer:
    """What a node brings: its number among `nodes`, its workers and its host's name."""

    node: int
    nodes: int
    workers: int
    host: str


async def admit(connection: socket.socket, secret: str) -> tuple[Newcomer, Streams]:
    """Recognize a node at the first node. The connection is closed on any error.

    Raises:
        StrangerError: The peer is not a node of this job, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        match await _receive(connection):
            case {"protocol": int(protocol), "node": int(node), "challenge": str(text)}:
                pass
            case _:
                raise StrangerError
        where = connection.getpeername()[0]
        if protocol != PROTOCOL:
            await _refuse(connection, "the first node runs another version of Lockstep; install the same on all nodes")
            raise StrangerError(f"the node at {where} runs another version of Lockstep")
        if bool(text) != bool(secret):
            has, lacks = ("the first node", "this node") if secret else ("this node", "the first node")
            await _refuse(connection, f"{has} has {SECRET} set and {lacks} does not; set the same on all nodes")
            raise StrangerError(f"the node at {where} {'has no' if secret else 'has a'} {SECRET}")
        theirs, ours = _challenge(text), _new_challenge(secret)
        challenges = theirs + ours
        await _send(connection, {"challenge": ours.hex(), "proof": _proof(secret, 0, node, challenges)})
        match await _receive(connection):
            case {"proof": str(said), "nodes": int(nodes), "workers": int(workers), "host": str(host)}:
                pass
            case {"refused": _}:
                raise StrangerError(f"the node at {where} has another {SECRET}")
            case _:
                raise StrangerError
        if not _equal(said, _proof(secret, node, 0, challenges)):
            raise StrangerError(f"the node at {where} has another {SECRET}")
        streams = await asyncio.open_connection(sock=connection, limit=LIMIT_BYTES)
        return Newcomer(node, nodes, workers, printable(host)), streams


async def introduce(connection: socket.socket, newcomer: Newcomer, secret: str) -> Streams:
    """Introduce this node to the first one. The connection is closed on any error.

    Raises:
        MeetingError: The peer is not the first node of this job, or refuses this node.
        StrangerError: The peer answers in another protocol, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        ours = _new_challenge(secret)
        await _send(connection, {"protocol": PROTOCOL, "node": newcomer.node, "challenge": ours.hex()})
        match await _receive(connection):
            case {"refused": str(why)}:
                raise MeetingError(printable(why))
            case {"challenge": str(text), "proof": str(said)}:
                challenges = ours + (_challenge(text) if secret else b"")
            case _:
                raise StrangerError
        if not _equal(said, _proof(secret, 0, newcomer.node, challenges)):
            await _refuse(connection, "wrong secret")
            address, port, *_ = connection.getpeername()
            where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            raise MeetingError(
                f"the process that answers as node 0 at {where} does not know this job's secret: it belongs to "
                f"another job, or {SECRET} differs; set the same on all nodes"
            )
        await _send(connection, {**asdict(newcomer), "proof": _proof(secret, newcomer.node, 0, challenges)})
        return await asyncio.open_connection(sock=connection, limit=LIMIT_BYTES)


def _new_challenge(secret: str) -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES) if secret else b""


def _challenge(text: str) -> bytes:
    """The bytes of a peer's challenge, whose length is fixed: else other pairs of challenges would give one proof."""
    try:
        challenge = bytes.fromhex(text)
    except ValueError:
        raise StrangerError from None
    if len(challenge) != (CHALLENGE_BYTES if text else 0):
        raise StrangerError
    return challenge


def _proof(secret: str, sender: int, receiver: int, challenges: bytes) -> str:
    return proof(secret, f"node {sender} to node {receiver}", challenges).hex() if secret else ""


def _equal(said: str, expected: str) -> bool:
    return hmac.compare_digest(said.encode(errors="replace"), expected.encode())


async def _refuse(connection: socket.socket, why: str) -> None:
    with suppress(OSError):  # the peer has disconnected, which changes nothing
        await _send(connection, {"refused": why})


async def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, pack(message))


async def _receive(connection: socket.socket) -> dict[str, Any]:
    """The next message of a peer that has proven nothing yet: one line, and nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(connection, UNPROVEN_BYTES - len(line))
        if not part:  # disconnected, or the line is too long
            raise StrangerError
        line += part
    try:
        message = parse_json(line)
    except ValueError:
        raise StrangerError from None
    if not isinstance(message, dict):
        raise StrangerError
    return message


@contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
