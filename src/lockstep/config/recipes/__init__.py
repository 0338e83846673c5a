"""Recipes: complete configurations by name, as YAML files in this folder.

A recipe is chosen by the data set's name, by `--config NAME` or by `--config FILE.yaml`; flags override it. In addition
to the fields of a configuration, it may have `for_arch`, which maps model names to fields that override the recipe's.
An entry NAME also applies to `torchvision/NAME`. An entry `torchvision/NAME` also applies to NAME where NAME selects
torchvision's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lockstep.config.mapping import from_mapping
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError
from lockstep.files.untrusted import MAX_YAML_BYTES, parse_yaml

FOLDER = Path(__file__).parent
# Data sets that share another data set's recipe.
FOR_DATASET = {
    "fashion-mnist": "mnist",
    "cifar100": "cifar10",
    "synthetic": "imagefolder",
}


def names() -> list[str]:
    """Return the names of the recipes that come with Lockstep."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def for_source(source: str) -> str:
    """Return the recipe for a data set: a name, a folder or MODULE:FUNCTION."""
    name = FOR_DATASET.get(source, source)
    return name if name in names() else "imagefolder"


def load(name: str, arch: str | None = None) -> TrainConfig:
    """Read a recipe.

    Args:
        name: A recipe's name, or the path of a YAML file.
        arch: The model whose entry in `for_arch` is applied. Default: the recipe's model. For torchvision's models, the
            name must start with `torchvision/`.

    Raises:
        ConfigError: The recipe or file does not exist, is not YAML, or has a field that `TrainConfig` does not have.
    """
    values, origin = _read(name)
    if not isinstance(values, Mapping) or "for_arch" not in values:
        return from_mapping(TrainConfig, values, origin)
    common = {key: value for key, value in values.items() if key != "for_arch"}
    recipe = from_mapping(TrainConfig, common, origin)
    if not isinstance(values["for_arch"], Mapping):
        raise ConfigError(f"{origin}: for_arch must be a mapping from model names to fields")
    special = {
        str(each): from_mapping(TrainConfig, _merge(common, fields), f"{origin}: for_arch.{each}")
        for each, fields in values["for_arch"].items()
    }
    arch = arch or recipe.model.arch
    return special.get(arch, special.get(arch.removeprefix("torchvision/"), recipe))


def _merge(values: Any, fields: Any) -> Any:
    """Merge nested mappings; `fields` takes precedence."""
    if not (isinstance(values, Mapping) and isinstance(fields, Mapping)):
        return fields
    return {**values, **{key: _merge(values.get(key), field) for key, field in fields.items()}}


def _read(name: str) -> tuple[Any, str]:
    """Return the parsed YAML of a recipe, and its path for messages."""
    path = FOLDER / f"{name}.yaml" if name in names() else Path(name)
    try:
        with path.open("rb") as file:  # a pipe is allowed, because the user named it
            text = file.read(MAX_YAML_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"available recipes: {', '.join(names())}"
        raise ConfigError(f"--config {name}: cannot be read ({error}); {hint}") from None
    try:
        values = parse_yaml(text) or {}
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    return values, str(path)
