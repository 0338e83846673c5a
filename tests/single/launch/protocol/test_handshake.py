"""Manually started nodes recognize each other, keep strangers out, and count only their own lines."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from lockstep.launch.protocol.handshake import MeetingError, Seals, StrangerError, admit, introduce
from lockstep.launch.protocol.messages import (
    PROTOCOL,
    Alive,
    Answer,
    Introduction,
    Knock,
    MessageError,
    Refused,
    pack,
    unpack,
)
from lockstep.launch.protocol.reachability import listen

GUARD_SECONDS = 100.0
NODE = Introduction(1, 2, 4, "far-away", True, "ticket")


def guarded(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: object, **options: object) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **options), GUARD_SECONDS))

    return run


async def pair(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """A connection: the side that connects, and the one that accepts."""
    with listen(address) as listener:
        ours = socket.socket(listener.family)
        ours.setblocking(False)
        listener.setblocking(False)
        await asyncio.get_running_loop().sock_connect(ours, listener.getsockname())
        theirs, _ = await asyncio.get_running_loop().sock_accept(listener)
    return ours, theirs


async def carry(source: socket.socket, target: socket.socket, kept: list[bytes]) -> None:
    while received := await asyncio.get_running_loop().sock_recv(source, 1 << 16):
        kept.append(received)
        await asyncio.get_running_loop().sock_sendall(target, received)


async def record(secret: str) -> tuple[list[bytes], list[bytes]]:
    """What a node and the first one send each other, as read by a program between them."""
    (node, between), (outward, first) = await pair(), await pair()
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    copying = [
        asyncio.create_task(carry(between, outward, sent[0])),
        asyncio.create_task(carry(outward, between, sent[1])),
    ]
    (newcomer, _), _ = await asyncio.gather(admit(first, secret), introduce(node, NODE, secret))
    assert newcomer == NODE
    for each in (node, first):
        each.close()
    await asyncio.wait(copying)
    between.close()
    outward.close()
    return sent


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secret", ["", "secret"])
@guarded
async def test_first_node_recognizes_another(address: str, secret: str) -> None:
    node, first = await pair(address)
    with node, first:
        (newcomer, _), _ = await asyncio.gather(admit(first, secret), introduce(node, NODE, secret))
    assert newcomer == NODE


@pytest.mark.parametrize(
    ("first", "other", "why", "reported"),
    [
        ("secret", "other", "does not know this job's secret", "has another LOCKSTEP_JOB_SECRET"),
        ("secret", "", "the first node has LOCKSTEP_JOB_SECRET", "has no LOCKSTEP_JOB_SECRET"),
        ("", "secret", "this node has LOCKSTEP_JOB_SECRET", "has a LOCKSTEP_JOB_SECRET"),
    ],
)
@guarded
async def test_another_secret_is_named_on_both_sides(first: str, other: str, why: str, reported: str) -> None:
    ours, theirs = await pair()
    with ours, theirs:
        stranger, error = await asyncio.gather(
            admit(theirs, first), introduce(ours, NODE, other), return_exceptions=True
        )
    assert isinstance(error, MeetingError)
    assert why in str(error)
    assert str(stranger) == f"the node at 127.0.0.1 {reported}"


@guarded
async def test_another_version_is_named_on_both_sides() -> None:
    ours, theirs = await pair()
    with ours, theirs:
        await asyncio.get_running_loop().sock_sendall(ours, pack(Knock(1, "", PROTOCOL + 1)))
        with pytest.raises(StrangerError, match=r"127\.0\.0\.1 runs another version of Lockstep"):
            await admit(theirs, "secret")
        answer = unpack(await asyncio.get_running_loop().sock_recv(ours, 1 << 16))
    assert answer == Refused("the first node runs another version of Lockstep; install the same on all nodes")


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b"\xff\xfe\n",
    b"x" * 100_000,
    b"[" * 1000 + b"\n",
    b"{}\n{}\n",
    pack(Knock(1, "")).replace(b"1", b'"1"', 1),
    pack(Knock(1, "no hexadecimal digits")),
    pack(Knock(1, "00")),
    pack(Knock(0, "")),  # as which the first node's own proof would be valid
    pack(Alive()),
]


@pytest.mark.parametrize("secret", ["", "secret"])
@guarded
async def test_first_node_drops_strangers(secret: str) -> None:
    for nonsense in STRANGE:
        ours, theirs = await pair()
        with ours, theirs:
            await asyncio.get_running_loop().sock_sendall(ours, nonsense)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises(StrangerError):
                await admit(theirs, secret)
            assert theirs.fileno() == -1  # closed


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"[1]\n", b'{"is": "answer", "proof": 1}\n', b"x" * 100_000]
)
@guarded
async def test_node_drops_strangers(answer: bytes) -> None:
    ours, theirs = await pair()
    with ours, theirs:
        await asyncio.get_running_loop().sock_sendall(theirs, answer)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(StrangerError):
            await introduce(ours, NODE, "")
        assert ours.fileno() == -1


@guarded
async def test_replayed_messages_of_a_node_are_no_proof() -> None:
    sent, _ = await record("secret")
    ours, theirs = await pair()
    with ours, theirs:
        admitting = asyncio.create_task(admit(theirs, "secret"))
        await asyncio.get_running_loop().sock_sendall(ours, sent[0])
        await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
        await asyncio.get_running_loop().sock_sendall(ours, sent[1])
        with pytest.raises(StrangerError, match="has another LOCKSTEP_JOB_SECRET"):
            await admitting


@guarded
async def test_replayed_messages_of_the_first_node_are_no_proof() -> None:
    _, sent = await record("secret")
    ours, theirs = await pair()
    with ours, theirs:
        await asyncio.get_running_loop().sock_sendall(theirs, sent[0])
        with pytest.raises(MeetingError, match="does not know this job's secret"):
            await introduce(ours, NODE, "secret")


@guarded
async def test_first_nodes_own_proof_is_none_of_another() -> None:
    ours, theirs = await pair()
    with ours, theirs:
        admitting = asyncio.create_task(admit(theirs, "secret"))
        await asyncio.get_running_loop().sock_sendall(ours, pack(Knock(1, "00" * 16)))
        answer = unpack(await asyncio.get_running_loop().sock_recv(ours, 1 << 16))
        assert isinstance(answer, Answer)
        reflected = pack(Introduction(node=1, nodes=2, workers=1, host="mirror", obeys=False, ticket=""))
        await asyncio.get_running_loop().sock_sendall(ours, answer.proof.encode() + b" " + reflected)
        with pytest.raises(StrangerError, match="has another LOCKSTEP_JOB_SECRET"):
            await admitting


CHALLENGES = b"x" * 32


def first(secret: str = "secret", challenges: bytes = CHALLENGES) -> Seals:
    return Seals.of(secret, 0, 1, challenges)


def other(secret: str = "secret", challenges: bytes = CHALLENGES) -> Seals:
    return Seals.of(secret, 1, 0, challenges)


@pytest.mark.parametrize("secret", ["", "secret"])
def test_lines_arrive_in_both_directions(secret: str) -> None:
    ours, theirs, lines = first(secret), other(secret), (b"{}\n", b"\n", b"a b c\n", b"\xff\n", b"{}\n")
    for line in lines:
        assert theirs.incoming.remove(ours.outgoing.add(line)) == line
        assert ours.incoming.remove(theirs.outgoing.add(line)) == line


def sealed(*lines: bytes) -> list[bytes]:
    seals = first()
    return [seals.outgoing.add(line) for line in lines]


A, B = sealed(b"a\n", b"b\n")


@pytest.mark.parametrize(
    "received",
    [
        [A, A],
        [B],
        [A[:-2] + b"c\n"],
        [b"a\n"],
        [b"\n"],
        [b" a\n"],
        [other().outgoing.add(b"a\n")],
        [first("wrong").outgoing.add(b"a\n")],
        [first(challenges=b"y" * 32).outgoing.add(b"a\n")],
        [Seals.of("secret", 0, 2, CHALLENGES).outgoing.add(b"a\n")],
    ],
    ids=[
        *("repeated", "one is left out", "changed", "without an HMAC", "empty", "an empty HMAC"),
        *("reflected", "another secret", "another connection", "to another node"),
    ],
)
def test_other_lines_are_errors(received: Sequence[bytes]) -> None:
    seals = other()
    for line in received[:-1]:
        assert seals.incoming.remove(line)
    with pytest.raises(MessageError, match="was changed between the nodes"):
        seals.incoming.remove(received[-1])
