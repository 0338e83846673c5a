"""Names of run folders: runs/DATASET-ARCH-TIME."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lockstep.config.schema import TrainConfig

RUNS = Path("runs")


def new_run_path(config: TrainConfig) -> Path:
    """A name for a new run: runs/DATASET-ARCH-TIME, not yet taken."""
    stem = RUNS / f"{slug(config)}{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def runs_of(config: TrainConfig) -> list[Path]:
    """The run folders in runs/ with names of this data set and architecture."""
    name = re.compile(re.escape(slug(config)) + r"\d{8}-\d{6}(-\d+)?")
    return [path for path in RUNS.glob("*") if name.fullmatch(path.name)]


def slug(config: TrainConfig) -> str:
    """DATASET-ARCH- in letters that any file system takes; of a path or a MODULE:NAME, the last part."""
    words = (config.data.source, config.model.arch)
    names = (re.split(r"[:/]", word.rstrip("/"))[-1] for word in words)
    return "".join(re.sub(r"[^\w.-]", "_", name) + "-" for name in names)
