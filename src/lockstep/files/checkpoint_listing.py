"""The checkpoints in a `checkpoints` folder, by the names of its files alone; without torch, which imports slowly."""

from __future__ import annotations

from pathlib import Path

MANIFEST_FILE = "manifest.json"  # written last
PREFIX = "step-"


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step after which a checkpoint was taken, by its folder's name."""
    return int(path.name.removeprefix(PREFIX))


def all_in(folder: Path) -> list[Path]:
    """The checkpoints, oldest first, also those whose manifest is lost."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdecimal()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return [path for path in all_in(folder) if (path / MANIFEST_FILE).exists()]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next((path for path in reversed(all_in(folder)) if (path / MANIFEST_FILE).exists()), None)
