"""Training as a Python function: your model, your data, Lockstep's loop."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from lockstep.config.schema import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    NumericsConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from lockstep.data.sources.user_dataset import describe
from lockstep.errors import ConfigError
from lockstep.train.loop import Result
from lockstep.train.run import run_with
from lockstep.world.launcher_environment import Place
from lockstep.world.world import connect

_GROUPS: dict[str, Any] = {
    "data": DataConfig,
    "augment": AugmentConfig,
    "model": ModelConfig,
    "optim": OptimConfig,
    "parallel": ParallelConfig,
    "numerics": NumericsConfig,
    "run": RunConfig,
}


_NOT_FOR_FIT = frozenset({"arch", "dataset", "data", "data_dir", "download", "in_memory", "image_size", "evaluate"})


def fit(model: nn.Module, train_set: Any, val_set: Any, **settings: Any) -> Result:
    """Train a model and return what came out; call it in every worker that the launcher started, or in one alone.

    Args:
        model: Images [N, C, H, W] to logits [N, K], both floating.
        train_set: Map-style data set of (image tensor [C, H, W], label). Floating images are taken as they are; uint8
            images are scaled to 0 to 1.
        val_set: The same, for evaluation.
        **settings: Any field of `TrainConfig` or of its groups by name, such as epochs=10, batch_size=64, lr=0.1,
            run_dir="runs/mine", resume="auto".

    Returns:
        The last evaluation's figures, on every worker.

    Raises:
        ConfigError: A setting that there is not, or a value that cannot be.
        LockstepError: Of the kind that says what went wrong; see `lockstep.errors`.
    """
    given = sorted(_NOT_FOR_FIT & settings.keys())
    if given:
        raise ConfigError(f"fit() is given its model and its data; leave out {', '.join(given)}")
    config = configure(**settings)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, arch=_name_of(model)),
        data=dataclasses.replace(config.data, data=_name_of(train_set)),
    )
    data = describe(type(train_set).__name__, train_set, val_set)
    with connect(Place.from_environment(), config.device, config.parallel.dist_backend) as world:
        return run_with(config, world, data, model)


def _name_of(thing: Any) -> str:
    """MODULE:CLASS of an object, for records and messages."""
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def configure(**settings: Any) -> TrainConfig:
    """A configuration from flat settings; each goes to the group that has a field of its name.

    Raises:
        ConfigError: There is no such field; the message names the nearest.
    """
    own = {field.name for field in dataclasses.fields(TrainConfig)} - _GROUPS.keys()
    home = {field.name: group for group, kind in _GROUPS.items() for field in dataclasses.fields(kind)}
    grouped: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    top: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in own and name not in home:
            near = get_close_matches(name, [*own, *home], n=1)
            raise ConfigError(f"fit() has no setting {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        target = top if name in own else grouped[home[name]]
        target[name] = Path(value) if name in ("run_dir", "data_dir") else value
    return TrainConfig(**top, **{group: kind(**grouped[group]) for group, kind in _GROUPS.items()})
