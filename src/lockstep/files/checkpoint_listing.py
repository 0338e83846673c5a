"""List the checkpoints in a `checkpoints` folder by their names, without importing torch, which is slow."""

from __future__ import annotations

from pathlib import Path

MANIFEST_FILE = "manifest.json"  # written last
PREFIX = "step-"


def name_of(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was taken, parsed from its folder name."""
    return int(path.name.removeprefix(PREFIX))


def all_in(folder: Path) -> list[Path]:
    """Return all checkpoints, oldest first, including those without a manifest."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [path for path in all_in(folder) if (path / MANIFEST_FILE).exists()]


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return next((path for path in reversed(all_in(folder)) if (path / MANIFEST_FILE).exists()), None)
