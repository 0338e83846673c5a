"""Error messages for requests that differ between workers, with Horovod's wording."""

from __future__ import annotations

from itertools import combinations

from lockstep.hvd.engine.request import Description, kind_of


def explain_mismatch(descriptions: dict[int, Description]) -> str:
    """Return the error message for the first difference between the workers' descriptions, by rank."""
    for (rank, one), (other_rank, other) in combinations(descriptions.items(), 2):
        if text := _difference(one, other):
            return f"Mismatched {text} (tensor {one['name']!r}, ranks {rank} and {other_rank})"
    return f"Mismatched requests for {next(iter(descriptions.values()))['name']!r}."


def _difference(one: Description, other: Description) -> str:
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
    return _difference_of_shapes(one, other) or kind_of(one).difference(one["terms"], other["terms"])


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
