"""Parse a command's arguments into its dataclass; for `train`, a recipe provides the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated, ClassVar, Literal, TypeVar

from lockstep.cli import HELP
from lockstep.cli.arguments import read
from lockstep.config.flags import arg
from lockstep.config.schema import TrainConfig
from lockstep.errors import LockstepError
from lockstep.launch.plan.options import LaunchOptions
from lockstep.launch.plan.restart_options import RestartOptions

T = TypeVar("T")
# For commands that read a checkpoint; `train` has a default model.
Arch = Annotated[str | None, arg(aliases=["-a", "--model"], metavar="MODEL")]
Workers = Annotated[int | Literal["auto"] | None, arg(name="np", aliases=["-np"], metavar="N|auto")]


@dataclass(frozen=True)
class TrainCommand:
    """Train a model on a data set or a folder of images.
    Defaults are those of the data set's recipe; --print-config prints the resulting configuration.

    Examples:
        lockstep train cifar10 -np 4
        lockstep train photos/ -a resnet50 --pretrained default -np auto
        lockstep train imagenet -H host1:8,host2:8 --resume auto
    """

    common: ClassVar[dict[str, str]] = {
        "Data": "DATASET|FOLDER --data --workers",
        "Model": "--arch --pretrained",
        "Training": "--config --epochs --batch-size --global-batch-size --optimizer --lr --weight-decay --precision"
        " --seed",
        "Workers": "--np --device --hosts --max-restarts",
        "Output": "--run-dir --resume --evaluate --quiet --print-config --dry-run",
    }

    job: TrainConfig = field(default_factory=TrainConfig)
    workers: Workers = None
    """Number of workers; auto: one per GPU. Default: 1, or one per slot."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    restarts: RestartOptions = field(default_factory=RestartOptions)
    config: Annotated[str | None, arg(metavar="RECIPE|FILE.yaml")] = None
    """Recipe to use instead of the data set's."""
    print_config: bool = False
    """Print the resulting configuration as YAML and exit."""


def parse(kind: type[T], command: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Parse arguments into a dataclass; --help and --help-all print the help and exit.

    Raises:
        ConfigError: An argument is unknown, missing or invalid.
    """
    if asked := [argument for argument in arguments if argument in HELP]:
        from lockstep.cli.help import explain

        print(explain(kind, command, default, shows_all="--help-all" in asked))
        raise SystemExit(0)
    return read(kind, command, arguments, default)


def parse_train(arguments: Sequence[str]) -> TrainCommand:
    """Parse `lockstep train`'s arguments; they override the recipe of the data set or of --config.

    The result for the latest arguments is cached, so that a forked worker does not parse them again. The defaults that
    --help shows are the values that result from the other arguments.

    Raises:
        ConfigError: An argument or the recipe is invalid, or the recipe cannot be read.
    """
    others = tuple(argument for argument in arguments if argument not in HELP)
    if len(others) == len(arguments):
        return _parse_train(others)
    try:
        defaults = _parse_train(others)
    except LockstepError:  # show the help anyway
        defaults = _parse_train(())
    return parse(TrainCommand, "train", arguments, defaults)


@lru_cache(1)
def _parse_train(arguments: tuple[str, ...]) -> TrainCommand:
    from lockstep.config import recipes  # imports YAML, which other commands do not need

    # Even the first pass needs a recipe: a flag may be valid only with a setting that comes from the recipe.
    first = recipes.load(_config_named_in(arguments) or recipes.for_source(""))
    flags = read(TrainCommand, "train", arguments, TrainCommand(job=_without_choices(first)))
    name = flags.config or recipes.for_source(flags.job.data.source)
    recipe = recipes.load(name)
    command = read(TrainCommand, "train", arguments, TrainCommand(job=_without_conflicts(recipe, flags.job)))
    for_arch = recipes.load(name, _qualified_arch(command.job))
    if for_arch == recipe:
        return command
    return read(TrainCommand, "train", arguments, TrainCommand(job=_without_conflicts(for_arch, flags.job)))


def _qualified_arch(job: TrainConfig) -> str:
    """Return the model's name, prefixed with `torchvision/` if it means torchvision's model at this image size."""
    from lockstep.data.catalog import NAMED
    from lockstep.models.registry import SMALL_SIDE, ZOO

    small_set = job.data.source in NAMED and job.data.source not in ("imagenet", "synthetic")
    side = 0 if small_set else job.data.image_size or 224
    arch = job.model.arch
    return f"torchvision/{arch}" if arch in ZOO and side > SMALL_SIDE else arch


def named_arch(command: TrainCommand, arguments: Sequence[str]) -> str | None:
    """Return the model from --arch or --model, or a recipe's MODULE:FUNCTION; None for any other model of a recipe."""
    nameless = replace(command.job, model=replace(command.job.model, arch=""))
    arch = read(TrainCommand, "train", arguments, TrainCommand(job=nameless)).job.model.arch
    return arch or (command.job.model.arch if command.job.model.is_custom else None)


def _config_named_in(arguments: Sequence[str]) -> str | None:
    """Return the value of --config, before the arguments are parsed."""
    for argument, following in zip_longest(arguments, arguments[1:]):
        if argument == "--config" or argument.startswith("--config="):
            return following if argument == "--config" else argument.partition("=")[2]
    return None


def _without_choices(recipe: TrainConfig) -> TrainConfig:
    """Remove the data set and the batch size from a recipe, so that the result shows whether flags set them."""
    data = replace(recipe.data, dataset="", data=None)
    return replace(recipe, data=data, batch_size=None, global_batch_size=None)


def _without_conflicts(recipe: TrainConfig, flags: TrainConfig) -> TrainConfig:
    """Remove the settings that conflict with the given flags from a recipe."""
    if flags.batch_size is not None:
        recipe = replace(recipe, global_batch_size=None)
    if flags.global_batch_size is not None:
        recipe = replace(recipe, batch_size=None)
    if flags.data.dataset or flags.data.data or flags.run.evaluate:  # -e uses the checkpoint's data set
        recipe = replace(recipe, data=replace(recipe.data, dataset="", data=None))
    return recipe
