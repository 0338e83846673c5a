"""The handshake of manually started nodes, before they exchange anything else.

It has three messages: the node's number and challenge; the first node's proof and challenge; and, with an HMAC like all
lines that follow (`sealed_lines`), what the node says about itself. The proof and the key of the HMACs cover both
challenges and name the sender and the receiver, so recorded or reflected ones are invalid. Without a secret there are
neither, and the third message only shows that the node is connected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

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
from lockstep.launch.protocol.sealed_lines import Seals

UNPROVEN_BYTES = 1 << 10  # limit for a message; a host name takes at most 255


class MeetingError(LockstepError):
    """This node cannot join the job."""


class StrangerError(Exception):
    """The peer is not a node of this job; the message, if any, helps to find out why the nodes do not connect."""


@dataclass(frozen=True)
class Newcomer:
    """A node that connects: its number among `nodes`, its number of workers and its host's name.

    Args:
        obeys: It runs the first node's command, because its own is a study or has `--stage`.
        ticket: That of the `Launch` which this connection answers; "" for the node's first connection.
    """

    node: int
    nodes: int
    workers: int
    host: str
    obeys: bool = False
    ticket: str = ""


async def admit(connection: socket.socket, secret: str) -> tuple[Newcomer, Seals]:
    """Recognize a node at the first node; return it, with the seals of what follows.

    The connection is closed on any error.

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
        await _send(connection, Answer(_proof(secret, knock.node, challenges), ours.hex()))
        seals, line = Seals.of(secret, 0, knock.node, challenges), await _receive_line(connection)
        try:
            answer = _message(seals.incoming.remove(line))
        except MessageError:  # such as `Refused`
            raise StrangerError(f"the node at {where} has another {SECRET}") from None
        if not isinstance(answer, Introduction):
            raise StrangerError
        about = answer.nodes, answer.workers, printable(answer.host), answer.obeys, answer.ticket
        return Newcomer(knock.node, *about), seals


async def introduce(connection: socket.socket, newcomer: Newcomer, secret: str) -> Seals:
    """Introduce this node to the first one; return the seals of what follows.

    The connection is closed on any error.

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
        expected = _proof(secret, newcomer.node, challenges)
        if not hmac.compare_digest(answered.encode(errors="replace"), expected.encode()):
            await _refuse(connection, "wrong secret")
            address, port, *_ = connection.getpeername()
            where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            raise MeetingError(
                f"the process that answers as node 0 at {where} does not know this job's secret: it belongs to "
                f"another job, or {SECRET} differs; set the same on all nodes"
            )
        seals, own = Seals.of(secret, newcomer.node, 0, challenges), asdict(newcomer)
        del own["node"]
        await asyncio.get_running_loop().sock_sendall(connection, seals.outgoing.add(pack(Introduction(**own))))
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
        await _send(connection, Refused(why))


async def _send(connection: socket.socket, message: Message) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, pack(message))


async def _receive(connection: socket.socket) -> Message:
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


def _message(line: bytes) -> Message:
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
