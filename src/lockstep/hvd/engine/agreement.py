"""Computes from one round's messages which requests all workers have pending, and which of them differ.

Pure functions from bytes to names: all workers get the same result from the same messages. A message is a header and
one entry per pending request: an 8-byte hash of its name and an 8-byte hash of all that must match on all workers. For
requests that differ, `explain_mismatch` writes the error with Horovod's wording.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, zip_longest

from lockstep.hvd.engine.request import Description, kind_of

HEADER = struct.Struct("<II")  # length of the entries in bytes, whether the worker has joined
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


def explain_mismatch(descriptions: dict[int, Description]) -> str:
    """Return the error message for the first difference between the workers' descriptions, by rank."""
    for (rank, one), (other_rank, other) in combinations(descriptions.items(), 2):
        if text := _difference(one, other):
            return f"Mismatched {text} (tensor {one['name']!r}, ranks {rank} and {other_rank})"
    return f"Mismatched requests for {next(iter(descriptions.values()))['name']!r}."


ORDER = (
    "Pass the same parameters in the same order on all workers, and freeze the same ones. A set of names has another "
    "order in each process: sort it, and pass named_parameters"
)


def differing_order(one: Sequence[str], other: Sequence[str]) -> str:
    """Return how two workers' lists of parameters differ, as text after "Mismatched"; empty if they are equal."""
    start = next((place for place, pair in enumerate(zip_longest(one, other)) if pair[0] != pair[1]), None)
    if start is None:
        return ""
    mine, theirs = _excerpt(one, start), _excerpt(other, start)
    return f"parameters: From number {start + 1} on, one rank has {mine}, but another rank has {theirs}. {ORDER}."


def _excerpt(names: Sequence[str], start: int) -> str:
    return ", ".join([*names[start : start + 4], *["..."] * (len(names) > start + 4)]) or "none"


def _difference(one: Description, other: Description) -> str:
    if text := differing_order(one["members"], other["members"]):
        return text
    kind = one["kind"].upper()
    if one["grouped"] != other["grouped"]:
        return f"{kind} groups: One rank sent a group of tensors, but another rank sent a single tensor."
    if len(one["shapes"]) != len(other["shapes"]):
        return (
            f"{kind} group sizes: One rank sent {len(one['shapes'])} tensors, but another rank sent "
            f"{len(other['shapes'])} tensors."
        )
    for mine, theirs in zip(one["dtypes"], other["dtypes"], strict=True):
        if mine != theirs:
            return f"data types: One rank had type {mine}, but another rank had type {theirs}."
    for mine, theirs in zip(one["devices"], other["devices"], strict=True):
        if mine != theirs:
            return (
                f"{kind} CPU/GPU device selection: One rank specified device {mine}, but another rank specified "
                f"device {theirs}."
            )
    if text := _difference_of_shapes(one, other):
        return f"{text} {ORDER}." if one["members"] else text
    return kind_of(one).difference(one["terms"], other["terms"])


def _difference_of_shapes(one: Description, other: Description) -> str:
    kind = one["kind"].upper()
    first = 1 if kind_of(one).free_rows else 0
    for mine, theirs in zip(one["shapes"], other["shapes"], strict=True):
        if len(mine) != len(theirs):
            return (
                f"{kind} tensor shapes: One rank sent a tensor of rank {len(mine)}, but another rank sent a tensor of "
                f"rank {len(theirs)}: shapes {mine} and {theirs}."
            )
        if mine[first:] != theirs[first:]:
            return (
                f"{kind} tensor shapes: One rank sent a tensor of shape {mine}, but another rank sent a tensor of "
                f"shape {theirs}."
            )
    return ""
