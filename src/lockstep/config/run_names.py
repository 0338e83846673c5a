"""Names of run folders: runs/DATASET-ARCH-TIME."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lockstep.config.schema import TrainConfig

RUNS = Path("runs")


def new_run_path(config: TrainConfig) -> Path:
    """Return an unused path for a new run: runs/DATASET-ARCH-TIME."""
    stem = RUNS / f"{slug(config)}{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def runs_of(config: TrainConfig) -> list[Path]:
    """Return the run folders in runs/ that are named after this data set and architecture."""
    name = re.compile(re.escape(slug(config)) + r"\d{8}-\d{6}(-\d+)?")
    return [path for path in RUNS.glob("*") if name.fullmatch(path.name)]


def slug(config: TrainConfig) -> str:
    """Return DATASET-ARCH- in letters, digits, "_", "." and "-", with the last part of a path or MODULE:NAME."""
    names = (re.split(r"[:/]", name.rstrip("/"))[-1] for name in (config.data.source, config.model.arch))
    return "".join(re.sub(r"[^\w.-]", "_", name) + "-" for name in names)
