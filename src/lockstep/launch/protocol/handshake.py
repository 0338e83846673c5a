"""The connections between manually started nodes: a handshake, and then lines with HMACs.

The handshake has three messages: the node's number and challenge; the first node's proof and challenge; and, with an
HMAC like all lines that follow, what the node says about itself. The proof and the key of the HMACs cover both
challenges and name the sender and the receiver, so recorded or reflected ones are invalid. Without a secret there are
neither, and the third message only shows that the node is connected.

The HMAC of a line shows its sender, its connection and its position: a line that is recorded, repeated, left out,
moved, reflected or changed is an error. Lines are not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from lockstep.errors import LockstepError, printable
from lockstep.launch.plan.worker_variables import SECRET
from lockstep.launch.protocol import messages
from lockstep.launch.protocol.reachability import CHALLENGE_BYTES, proof

UNPROVEN_BYTES = 1 << 10  # limit for a message; a host name takes at most 255
COUNT_BYTES = 8


class MeetingError(LockstepError):
    """This node cannot join the job."""


class StrangerError(Exception):
    """The peer is not a node of this job; the message, if any, helps to find out why the nodes do not connect."""


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
            raise messages.MessageError("a line was changed between the nodes, or comes from another program")
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


async def admit(connection: socket.socket, secret: str) -> tuple[messages.Introduction, Seals]:
    """Recognize a node at the first node; return it, with the seals of what follows.

    The connection is closed on any error.

    Raises:
        StrangerError: The peer is not a node of this job, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        knock = await _receive(connection)
        where = connection.getpeername()[0]
        if isinstance(knock, messages.Foreign):
            await _refuse(connection, "the first node runs another version of Lockstep; install the same on all nodes")
            raise StrangerError(f"the node at {where} runs another version of Lockstep")
        if not isinstance(knock, messages.Knock) or knock.node < 1:
            raise StrangerError
        if bool(knock.challenge) != bool(secret):
            has, lacks = ("the first node", "this node") if secret else ("this node", "the first node")
            await _refuse(connection, f"{has} has {SECRET} set and {lacks} does not; set the same on all nodes")
            raise StrangerError(f"the node at {where} {'has no' if secret else 'has a'} {SECRET}")
        theirs, ours = _challenge(knock.challenge), _new_challenge(secret)
        challenges = theirs + ours
        await _send(connection, messages.Answer(_proof(secret, knock.node, challenges), ours.hex()))
        seals, line = Seals.of(secret, 0, knock.node, challenges), await _receive_line(connection)
        try:
            newcomer = _message(seals.incoming.remove(line))
        except messages.MessageError:  # such as `Refused`
            raise StrangerError(f"the node at {where} has another {SECRET}") from None
        if not isinstance(newcomer, messages.Introduction) or newcomer.node != knock.node:
            raise StrangerError
        return replace(newcomer, host=printable(newcomer.host)), seals


async def introduce(connection: socket.socket, newcomer: messages.Introduction, secret: str) -> Seals:
    """Introduce this node to the first one; return the seals of what follows.

    The connection is closed on any error.

    Raises:
        MeetingError: The peer is not the first node of this job, or refuses this node.
        StrangerError: The peer answers in another protocol, or disconnected.
        OSError: The connection broke.
    """
    with _closed_on_error(connection):
        ours = _new_challenge(secret)
        await _send(connection, messages.Knock(newcomer.node, ours.hex()))
        match await _receive(connection):
            case messages.Refused(why):
                raise MeetingError(printable(why))
            case messages.Answer(answered, challenge):
                challenges = ours + (_challenge(challenge) if secret else b"")
            case _:
                raise StrangerError
        expected = _proof(secret, newcomer.node, challenges)
        if not hmac.compare_digest(answered.encode(errors="replace"), expected.encode()):
            await _refuse(connection, "wrong secret")
            address, port, *_ = connection.getpeername()
            where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            raise MeetingError(
                f"the process that answers as node 0 at {where} does not know this job's secret: it belongs to "
                f"another job, or {SECRET} differs; set the same on all nodes"
            )
        seals = Seals.of(secret, newcomer.node, 0, challenges)
        await asyncio.get_running_loop().sock_sendall(connection, seals.outgoing.add(messages.pack(newcomer)))
        return seals


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


def _proof(secret: str, receiver: int, challenges: bytes) -> str:
    return proof(secret, f"node 0 to node {receiver}", challenges).hex() if secret else ""


async def _refuse(connection: socket.socket, why: str) -> None:
    with suppress(OSError):  # the peer may have disconnected
        await _send(connection, messages.Refused(why))


async def _send(connection: socket.socket, message: messages.Message) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, messages.pack(message))


async def _receive(connection: socket.socket) -> messages.Message:
    return _message(await _receive_line(connection))


async def _receive_line(connection: socket.socket) -> bytes:
    """Return the next line of an unproven peer, with nothing after it."""
    line = b""
    while not line.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(connection, UNPROVEN_BYTES - len(line))
        if not part:  # disconnected, or the line is too long
            raise StrangerError
        line += part
    return line


def _message(line: bytes) -> messages.Message:
    try:
        message = messages.unpack(line)
    except messages.MessageError:
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
