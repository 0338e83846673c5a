"""Which lines between manually started nodes count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lockstep.launch.protocol.messages import MessageError
from lockstep.launch.protocol.sealed_lines import Seals

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
