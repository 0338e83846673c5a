"""The collectives of this process, from the records that torch keeps of them (its flight recorder).

torch records the collectives of Gloo and NCCL; some versions do so only if TORCH_FR_BUFFER_SIZE is set, so the launcher
sets it. The functions are private and may be missing. Gloo's entries stay "scheduled": only `retired` and the group's
last completed number show that a collective has finished.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
MOST_ENTRIES = 3  # of each group; the oldest that is not finished is the one that a rank waits in


@dataclass(frozen=True)
class RecordedCollective:
    """A collective of one process group.

    Args:
        group: The group's name; "0" for the default one.
        number: Its number in this group, from 1: the same on all ranks for the same collective.
        name: As torch calls it, such as all_reduce.
        shapes: Dtypes and sizes of its inputs, such as "float[10]".
        is_finished: Whether it has finished on this rank.
    """

    group: str
    number: int
    name: str
    shapes: str
    is_finished: bool


def counts() -> tuple[int, int] | None:
    """Return how many collectives this process has started and finished, over all groups; None without records."""
    found = _dump(with_entries=False)
    if found is None:
        return None
    groups = [group for group in found.get("pg_status", {}).values() if isinstance(group, dict)]
    return _sum(groups, "last_enqueued_collective"), _sum(groups, "last_completed_collective")


def latest() -> list[RecordedCollective]:
    """Return the last finished and the unfinished collectives of each group."""
    found = _dump(with_entries=True) or {}
    by_group: dict[str, list[RecordedCollective]] = {}
    for entry in found.get("entries", []):
        if entry.get("is_p2p"):
            continue
        group = str((entry.get("process_group") or ["0"])[0])
        state = entry.get("state") == "completed" or bool(entry.get("retired"))
        name = str(entry.get("profiling_name", "")).rpartition(":")[2]
        number = int(entry.get("collective_seq_id", 0))
        by_group.setdefault(group, []).append(RecordedCollective(group, number, name, _shapes(entry), state))
    return [each for entries in by_group.values() for each in _of_interest(entries)]


def _of_interest(entries: list[RecordedCollective]) -> list[RecordedCollective]:
    entries = sorted(entries, key=lambda entry: entry.number)
    finished = [entry for entry in entries if entry.is_finished]
    waiting = [entry for entry in entries if not entry.is_finished]
    return [*finished[-1:], *waiting[:MOST_ENTRIES]]


def _shapes(entry: dict[str, Any]) -> str:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    pairs = zip(sizes, dtypes, strict=False)
    return ", ".join(f"{str(dtype).lower()}{list(size)}" for size, dtype in pairs)


def _dump(with_entries: bool) -> dict[str, Any] | None:
    """Return torch's records; None if torch is not loaded, has no process group or keeps no records."""
    if not has_group():
        return None
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in DUMPS:
        if dump := getattr(module, name, None):
            try:
                found = json.loads(dump(includeCollectives=with_entries))
            except (RuntimeError, TypeError, ValueError):
                continue
            if isinstance(found, dict) and found.get("pg_status"):
                return found
    return None


def has_group() -> bool:
    """Whether this process has a torch process group, without importing torch."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return c10d is not None and bool(c10d.is_initialized())
    except AttributeError:  # it is being imported
        return False


def _sum(groups: list[dict[str, Any]], key: str) -> int:
    return sum(max(0, int(group.get(key, 0))) for group in groups)
