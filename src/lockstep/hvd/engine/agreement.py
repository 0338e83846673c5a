"""What the workers' messages of one round say together: what all are ready for, and what they disagree on.

Pure: bytes in, names out; every worker computes the same from the same messages. A message is a header and one entry
for each pending request: 8 bytes that stand for its name and 8 for everything that must be the same on all workers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = struct.Struct("<III")  # bytes of entries, whether the worker has joined, bytes of tensors that follow
HEADER_BYTES = HEADER.size
KEY_BYTES = 8
ENTRY_BYTES = 16


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round, in the order of the lowest rank that still submits.

    Attributes:
        agreed: Names that every worker has pending, or has joined and lacks, with one signature.
        mismatched: Names that every worker has pending, or has joined and lacks, with several signatures.
        lacking: For each agreed or mismatched name, the ranks that have joined and lack it (only where there are any).
    """

    agreed: tuple[bytes, ...]
    mismatched: tuple[bytes, ...]
    lacking: dict[bytes, tuple[int, ...]]


def entries_of(block: bytes) -> dict[bytes, bytes]:
    """Names and signatures of a message's entries, in order of submission."""
    starts = range(0, len(block), ENTRY_BYTES)
    return {block[at : at + KEY_BYTES]: block[at + KEY_BYTES : at + ENTRY_BYTES] for at in starts}


def agree(pending: Sequence[dict[bytes, bytes]], joined: Sequence[bool]) -> Verdict:
    """Compare the workers' pending requests.

    Args:
        pending: By rank, the signature of each name that is pending there.
        joined: By rank, whether the worker has joined, and so goes along with what it has not submitted.
    """
    leader = next((entries for entries, has_joined in zip(pending, joined, strict=True) if not has_joined), None)
    # Where many workers say the same, and the caller hands over one dictionary for all of them, it is read once.
    said = {(id(entries), has): (entries, has) for entries, has in zip(pending, joined, strict=True)}.values()
    candidates = {name: None for entries, _ in said for name in entries} if leader is None else leader
    agreed: list[bytes] = []
    mismatched: list[bytes] = []
    lacking: dict[bytes, tuple[int, ...]] = {}
    for name in candidates:
        without = [has_joined for entries, has_joined in said if name not in entries]
        if not all(without):
            continue
        if without:
            lacking[name] = tuple(rank for rank, entries in enumerate(pending) if name not in entries)
        signatures = {entries[name] for entries, _ in said if name in entries}
        (agreed if len(signatures) == 1 else mismatched).append(name)
    return Verdict(tuple(agreed), tuple(mismatched), lacking)
