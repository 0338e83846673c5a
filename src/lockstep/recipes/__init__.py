"""Recipes: complete, typed configurations by name, as YAML files beside this one.

A recipe is chosen by the data set's name, by `--config NAME` or by `--config FILE.yaml`; flags override it.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml

from lockstep.config import TrainConfig
from lockstep.config_mapping import from_mapping
from lockstep.errors import ConfigError

FOLDER = Path(__file__).parent
# Data sets that have no recipe of their own name.
FOR_DATASET = {
    "fashion-mnist": "mnist",
    "cifar100": "cifar10",
    "imagenet": "imagefolder",
    "synthetic": "imagefolder",
}


def names() -> list[str]:
    """The recipes that come with Lockstep."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def for_source(source: str) -> str:
    """The recipe for a data set's name, or for a folder or function of the user's own."""
    name = FOR_DATASET.get(source, source)
    return name if name in names() else "imagefolder"


def load(name: str) -> TrainConfig:
    """Read a recipe.

    Args:
        name: A recipe's name, or the path of a YAML file.

    Raises:
        ConfigError: No such recipe or file, no YAML, or a field that `TrainConfig` does not know.
    """
    path = FOLDER / f"{name}.yaml" if name in names() else Path(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"recipes are {', '.join(names())}"
        raise ConfigError(f"--config {name}: cannot be read ({error}); {hint}") from None
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    return from_mapping(values, str(path))
