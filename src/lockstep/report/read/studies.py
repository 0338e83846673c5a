"""Read the records of studies and of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import plural
from lockstep.files.fields import number, text
from lockstep.files.jsonl import read_records
from lockstep.report.read.lockstep_runs import describe_damage

COMPARISON = "comparison"  # written by benchmarks/harness.py
KINDS = ("scaling", "batch", "collectives", "loading", COMPARISON)
LARGE_BATCH = "large_batch"  # written by benchmarks/large_batch.py, without a kind
PREDICTION = "predict"  # the report fits the same model itself


def read_study(path: Path, warn: Callable[[str], None]) -> list[Mapping[str, Any]]:
    """Return the records of a file that the report can draw, each with its `kind`.

    Args:
        path: A study's .jsonl file.
        warn: Called with one line for each problem.
    """
    found: list[Mapping[str, Any]] = []
    damaged: list[int] = []
    others = predictions = 0
    try:
        for record in read_records(path, damaged.append):
            kind = _kind(record)
            if record.get("kind") == PREDICTION:
                predictions += 1
            elif kind is None:
                others += 1
            else:
                found.append({**record, "kind": kind})
    except OSError as error:
        warn(f"cannot read {path}: {error.strerror or error}")
        return []
    if damaged:
        warn(describe_damage(path, damaged))
    if others:
        warn(f"{path}: skipped {plural(others, 'record')} of a kind that the report does not draw")
    elif not found and not damaged and not predictions:
        warn(f"{path} has no records")
    return found


def _kind(record: Mapping[str, Any]) -> str | None:
    kind = text(record, "kind")
    if kind is None and (text(record, "name") or "").startswith(LARGE_BATCH) and number(record, "top1") is not None:
        return LARGE_BATCH
    return kind if kind in KINDS else None
