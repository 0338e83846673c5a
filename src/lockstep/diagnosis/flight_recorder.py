"""The collectives of this process, from the records that torch keeps of them (its flight recorder).

torch keeps a recorder for each backend; some versions do so only if TORCH_FR_BUFFER_SIZE is set, so it is set for
programs that are observed. A group of two backends, such as "cpu:gloo,cuda:nccl", is in both recorders, with different
numbers. The functions are private and may be missing. Gloo's entries stay "scheduled": only `retired` and the group's
last completed number show that a collective has finished.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

VARIABLE = ("TORCH_FR_BUFFER_SIZE", "2000")  # so many collectives; newer versions of torch record by default
BACKENDS = ("gloo", "nccl2", "nccl", "xccl")  # besides those of this process's groups
MAX_ENTRIES = 3  # of each group; the oldest that is not finished is the one that a rank waits in


@dataclass(frozen=True)
class RecordedCollective:
    """A collective of one process group.

    Args:
        group: The group's name; "0" for the default one. If the backend is not Gloo, it follows, as in "0/nccl".
        number: Its number in this group and backend, from 1: the same on all ranks for the same collective.
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
    """Return numbers that grow with the collectives started and finished, equal if none is pending.

    torch numbers a group's collectives from 1, or from 0 in backends that it records by a hook; -1 means none.

    Returns:
        The sums over all groups; None without records.
    """
    groups = [
        group
        for recorder in _dumps(with_entries=False).values()
        for group in recorder["pg_status"].values()
        if isinstance(group, dict)
    ]
    return (_sum(groups, "last_enqueued_collective"), _sum(groups, "last_completed_collective")) if groups else None


def started() -> int | None:
    """Return a number that grows with each collective that this process starts; None if not all are recorded."""
    keeps = hasattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json")
    if not keeps or os.environ.get(VARIABLE[0]) == "0" or not set(_own_backends()) <= {*BACKENDS}:
        return None
    return (counts() or (0, 0))[0]


def latest() -> list[RecordedCollective]:
    """Return the last finished and the unfinished collectives of each group and backend."""
    by_group: dict[str, list[RecordedCollective]] = {}
    entries = [(backend, each) for backend, found in _dumps(True).items() for each in found.get("entries", [])]
    for backend, entry in entries:
        if entry.get("is_p2p"):
            continue
        group = str((entry.get("process_group") or ["0"])[0]) + (f"/{backend}" if backend != "gloo" else "")
        state = entry.get("state") == "completed" or bool(entry.get("retired"))
        name = str(entry.get("profiling_name", "")).rpartition(":")[2]
        number = int(entry.get("collective_seq_id", 0))
        by_group.setdefault(group, []).append(RecordedCollective(group, number, name, _shapes(entry), state))
    return [each for entries in by_group.values() for each in _of_interest(entries)]


def _of_interest(entries: list[RecordedCollective]) -> list[RecordedCollective]:
    entries = sorted(entries, key=lambda entry: entry.number)
    finished = [entry for entry in entries if entry.is_finished]
    waiting = [entry for entry in entries if not entry.is_finished]
    return [*finished[-1:], *waiting[:MAX_ENTRIES]]


def _shapes(entry: dict[str, Any]) -> str:
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    pairs = zip(sizes, dtypes, strict=False)
    return ", ".join(f"{str(dtype).lower()}{list(size)}" for size, dtype in pairs)


def _dumps(with_entries: bool) -> dict[str, dict[str, Any]]:
    """Return the records of each backend; empty if torch is not loaded, has no process group or keeps no records."""
    if not has_group():
        return {}
    module = sys.modules.get("torch._C._distributed_c10d")
    dump, dump_nccl = (getattr(module, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    sources: list[tuple[str, Any, dict[str, str]]] = [("nccl", dump_nccl, {})]
    sources += [(name, dump, {"backend": name}) for name in dict.fromkeys((*BACKENDS, *_own_backends()))]
    sources += [("gloo", dump, {})]  # before torch 2.15, which has a recorder for each backend
    found: dict[str, dict[str, Any]] = {}
    for name, function, named in sources:
        if function is None or name in found:
            continue
        try:
            records = json.loads(function(includeCollectives=with_entries, **named))
        except (RuntimeError, TypeError, ValueError):
            continue
        if isinstance(records, dict) and records.get("pg_status"):
            found[name] = records
    return found


def _own_backends() -> list[str]:
    """Return the names of the backends of this process's groups."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        configs = list(c10d._world.pg_backend_config.values()) if c10d else []
    except (AttributeError, RuntimeError):  # another version; a new group
        return []
    return [part.rpartition(":")[2] for config in configs for part in str(config).split(",")]


def has_group() -> bool:
    """Whether this process has a torch process group, without importing torch."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return c10d is not None and bool(c10d.is_initialized())
    except AttributeError:  # it is being imported
        return False


def _sum(groups: list[dict[str, Any]], key: str) -> int:
    return sum(int(group.get(key, -1)) + 1 for group in groups)
