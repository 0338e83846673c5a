"""Machine, versions and commit of each measurement; without host names, paths and commands, for privacy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.files.fields import mapping, number, text
from lockstep.report.document import Cell, Section, filled_table
from lockstep.report.read.sources import Material

Facts = Mapping[str, Any]
_PACKAGES = {"lockstep-torch": "Lockstep", "torch": "PyTorch", "torchvision": "torchvision", "numpy": "NumPy"}
_COLUMNS = (
    ("measurement", ""),
    ("processor", ""),
    ("cores", ",.0f"),
    ("memory (GB)", ",.1f"),
    ("GPUs", ""),
    ("threads per worker", ",.0f"),
    ("system", ""),
    ("Python", ""),
    *((name, "") for name in _PACKAGES.values()),
    ("commit", ""),
)


def build(material: Material) -> Section | None:
    users: dict[tuple[Cell, ...], list[str]] = {}
    data_sets = material.data_sets()
    for data, part in data_sets.items():
        for run in part.runs:
            if run.environment:
                name = f"{data}: {run.name}" if len(data_sets) > 1 else run.name
                users.setdefault(_row(run.environment, run.environment), []).append(name)
    for record in material.studies:
        facts = mapping(record, "environment")
        if facts:
            users.setdefault(_row(facts, record), []).append(f"study: {record['kind'].replace('_', ' ')}")
    if not users:
        return None
    rows = [[_listed(list(dict.fromkeys(names))), *row] for row, names in users.items()]
    return Section("Environment", parts=[filled_table("environment", "Machines and versions", _COLUMNS, rows)])


def _row(facts: Facts, record: Facts) -> tuple[Cell, ...]:
    memory = number(facts, "memory_bytes")
    return (
        text(facts, "processor"),
        number(facts, "cores"),
        round(memory / 1e9, 1) if memory else None,
        _gpus(facts),
        number(facts, "threads_per_worker"),
        text(facts, "platform"),
        text(facts, "python"),
        *(text(facts, "packages", name) for name in _PACKAGES),
        text(facts, "commit") or text(record, "commit"),
    )


def _gpus(facts: Facts) -> str | None:
    """Describe the GPUs, such as "4 x NVIDIA A100"."""
    names = facts.get("gpus")
    found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found)) or None


def _listed(names: list[str]) -> str:
    return "; ".join(names) if len(names) <= 4 else f"{'; '.join(names[:3])}; and {len(names) - 3} more"
