"""Computes from one round's messages which requests all workers have pending, and which of them differ.

Pure functions from bytes to names: all workers get the same result from the same messages. A message is a header and
one entry per pending request: an 8-byte hash of its name and an 8-byte hash of all that must match on all workers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = struct.Struct("<III")  # length of the entries in bytes, whether the worker has joined, length of the tensors
HEADER_BYTES = HEADER.size
KEY_BYTES = 8
ENTRY_BYTES = 16


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round, in the submission order of the lowest rank that has not joined.

    Attributes:
        agreed: Names that are pending on every worker that has not joined, with equal signatures.
        mismatched: Names that are pending on every worker that has not joined, with different signatures.
        lacking: For agreed and mismatched names, the joined ranks on which they are not pending, if there are any.
    """

    agreed: tuple[bytes, ...]
    mismatched: tuple[bytes, ...]
    lacking: dict[bytes, tuple[int, ...]]


def entries_of(block: bytes) -> dict[bytes, bytes]:
    """Return the signature of each name in a message, in order of submission."""
    starts = range(0, len(block), ENTRY_BYTES)
    return {block[at : at + KEY_BYTES]: block[at + KEY_BYTES : at + ENTRY_BYTES] for at in starts}


def agree(pending: Sequence[dict[bytes, bytes]], joined: Sequence[bool]) -> Verdict:
    """Compare the workers' pending requests.

    Args:
        pending: By rank, the signature of each pending name.
        joined: By rank, whether the worker has joined; it then takes part in requests that it has not submitted.
    """
    leader = next((entries for entries, has_joined in zip(pending, joined, strict=True) if not has_joined), None)
    # Workers with equal messages share a dictionary; read each dictionary only once.
    distinct = {(id(entries), has): (entries, has) for entries, has in zip(pending, joined, strict=True)}.values()
    candidates = {name: None for entries, _ in distinct for name in entries} if leader is None else leader
    agreed: list[bytes] = []
    mismatched: list[bytes] = []
    lacking: dict[bytes, tuple[int, ...]] = {}
    for name in candidates:
        without = [has_joined for entries, has_joined in distinct if name not in entries]
        if not all(without):
            continue
        if without:
            lacking[name] = tuple(rank for rank, entries in enumerate(pending) if name not in entries)
        signatures = {entries[name] for entries, _ in distinct if name in entries}
        (agreed if len(signatures) == 1 else mismatched).append(name)
    return Verdict(tuple(agreed), tuple(mismatched), lacking)
