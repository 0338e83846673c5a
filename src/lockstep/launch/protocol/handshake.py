"""The handshake of manually started nodes, before they exchange anything else.

It has three messages: the node's number and challenge; the first node's proof and challenge; the node's proof, workers
and host. Each proof covers both challenges and names its sender and receiver, so a recorded or reflected proof is
invalid. Without a secret the proofs are empty, and the third message only shows that the node is connected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.files.untrusted import printable
from lockstep.launch.plan.worker_variables import SECRET
from lockstep.launch.protocol.messages import (
    Answer,
    Foreign,
    Introduction,
    Knock,
    Message,
    MessageError,
    Refused,
    pack,
    unpack,
)
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, proof

UNPROVEN_BYTES = 1 << 10  # limit for a message; a host name takes at most 255


class MeetingError(LockstepError):
    """This node cannot join the job."""


class StrangerError(Exception):
    """The peer is not a node of this job; the message, if any, helps to find out why the nodes do not connect."""


@dataclass(frozen=True)
class Newcomer:
    """A node that connects: its number among `nodes`, its number of workers and its host's name.

    Args:
        ticket: As in `Introduction`.
    """

    node: int
    nodes: int
    workers: int
    host: str
    ticket: str = ""


async def admit(connection: socket.socket, secret: str) -> Newcomer:
    """Recognize a node at the first node. The connection is closed on any error.

    Raises:
        StrangerError: The peer is not a node of this job, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        knock = await _receive(connection)
        where = connection.getpeername()[0]
        if isinstance(knock, Foreign):
            await _refuse(connection, "the first node runs another version of Lockstep; install the same on all nodes")
            raise StrangerError(f"the node at {where} runs another version of Lockstep")
        if not isinstance(knock, Knock) or knock.node < 1:
            raise StrangerError
        if bool(knock.challenge) != bool(secret):
            has, lacks = ("the first node", "this node") if secret else ("this node", "the first node")
            await _refuse(connection, f"{has} has {SECRET} set and {lacks} does not; set the same on all nodes")
            raise StrangerError(f"the node at {where} {'has no' if secret else 'has a'} {SECRET}")
        theirs, ours = _challenge(knock.challenge), _new_challenge(secret)
        challenges = theirs + ours
        await _send(connection, Answer(_proof(secret, 0, knock.node, challenges), ours.hex()))
        answer = await _receive(connection)
        if not isinstance(answer, Introduction | Refused):
            raise StrangerError
        if isinstance(answer, Refused) or not _equal(answer.proof, _proof(secret, knock.node, 0, challenges)):
            raise StrangerError(f"the node at {where} has another {SECRET}")
        return Newcomer(knock.node, answer.nodes, answer.workers, printable(answer.host), answer.ticket)


async def introduce(connection: socket.socket, newcomer: Newcomer, secret: str) -> None:
    """Introduce this node to the first one. The connection is closed on any error.

    Raises:
        MeetingError: The peer is not the first node of this job, or refuses this node.
        StrangerError: The peer answers in another protocol, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        ours = _new_challenge(secret)
        await _send(connection, Knock(newcomer.node, ours.hex()))
        match await _receive(connection):
            case Refused(why):
                raise MeetingError(printable(why))
            case Answer(answered, challenge):
                challenges = ours + (_challenge(challenge) if secret else b"")
            case _:
                raise StrangerError
        if not _equal(answered, _proof(secret, 0, newcomer.node, challenges)):
            await _refuse(connection, "wrong secret")
            address, port, *_ = connection.getpeername()
            where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            raise MeetingError(
                f"the process that answers as node 0 at {where} does not know this job's secret: it belongs to "
                f"another job, or {SECRET} differs; set the same on all nodes"
            )
        own = _proof(secret, newcomer.node, 0, challenges)
        introduction = Introduction(own, newcomer.nodes, newcomer.workers, newcomer.host, newcomer.ticket)
        await _send(connection, introduction)


def _new_challenge(secret: str) -> bytes:
    return secrets.token_bytes(CHALLENGE_BYTES) if secret else b""


def _challenge(text: str) -> bytes:
    """Return the bytes of a peer's challenge. A fixed length ensures that no two pairs of challenges have one proof."""
    try:
        challenge = bytes.fromhex(text)
    except ValueError:
        raise StrangerError from None
    if len(challenge) != (CHALLENGE_BYTES if text else 0):
        raise StrangerError
    return challenge


def _proof(secret: str, sender: int, receiver: int, challenges: bytes) -> str:
    return proof(secret, f"node {sender} to node {receiver}", challenges).hex() if secret else ""


def _equal(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode(errors="replace"), expected.encode())


async def _refuse(connection: socket.socket, why: str) -> None:
    with suppress(OSError):  # the peer may have disconnected
        await _send(connection, Refused(why))


async def _send(connection: socket.socket, message: Message) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, pack(message))


async def _receive(connection: socket.socket) -> Message:
    """Return the next message of an unproven peer: one line, and nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(connection, UNPROVEN_BYTES - len(line))
        if not part:  # disconnected, or the line is too long
            raise StrangerError
        line += part
    try:
        message = unpack(line)
    except MessageError:
        raise StrangerError from None
    if not message:
        raise StrangerError
    return message


@contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
