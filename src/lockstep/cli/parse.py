"""Reading a command's words into its dataclass, with tyro, and a recipe's values under the flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, arg

from lockstep.config import TrainConfig
from lockstep.launch.options import LaunchOptions

T = TypeVar("T")
Workers = Annotated[int | Literal["auto"] | None, arg(name="np", aliases=["-np"], metavar="N|auto")]


@dataclass(frozen=True)
class TrainCommand:
    """Train a network on a data set or a folder of images.

    The data set's recipe comes first and flags override it; --print-config shows the outcome.
    """

    job: TrainConfig = field(default_factory=TrainConfig)
    workers: Workers = None
    """Workers in all; auto: one a GPU; by default 1, or one a slot of the hosts or the batch job."""
    where: LaunchOptions = field(default_factory=LaunchOptions)
    config: Annotated[str | None, arg(metavar="RECIPE|FILE.yaml")] = None
    """Start from this recipe instead of the data set's own."""
    print_config: bool = False
    """Print the outcome of recipe and flags as YAML, and stop."""


def parse(kind: type[T], command: str, words: Sequence[str], default: T | None = None) -> T:
    """Read words into a dataclass; a wrong word ends the process with exit code 2 and says what was meant."""
    prog = f"lockstep {command}"
    if default is None:
        return tyro.cli(kind, prog=prog, args=words, config=(OmitArgPrefixes,))
    return tyro.cli(kind, prog=prog, args=words, default=default, config=(OmitArgPrefixes,))


def parse_train(words: Sequence[str]) -> TrainCommand:
    """Read `lockstep train`'s words: the flags over the recipe that the data set or --config names.

    Raises:
        ConfigError: The recipe cannot be read or is wrong, or --global-batch-size meets --batch-size.
    """
    from lockstep import recipes  # with YAML, which no other command needs

    flags = parse(TrainCommand, "train", words)
    name = flags.config or recipes.for_source(flags.job.data.source)
    recipe = recipes.load(name)
    command = parse(TrainCommand, "train", words, TrainCommand(job=_give_way(recipe, flags.job)))
    for_arch = recipes.load(name, command.job.model.arch)
    if for_arch == recipe:
        return command
    return parse(TrainCommand, "train", words, TrainCommand(job=_give_way(for_arch, flags.job)))


def _give_way(recipe: TrainConfig, flags: TrainConfig) -> TrainConfig:
    """The recipe without what contradicts the flags that were given."""
    if flags.batch_size is not None:
        recipe = replace(recipe, global_batch_size=None)
    if flags.global_batch_size is not None:
        recipe = replace(recipe, batch_size=None)
    if flags.data.dataset or flags.data.data or flags.run.evaluate:  # -e: the checkpoint's own set
        recipe = replace(recipe, data=replace(recipe.data, dataset="", data=None))
    return recipe
