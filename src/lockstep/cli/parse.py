"""Parse a command's arguments into its dataclass; for `train`, a recipe provides the defaults. Errors are one line."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from lockstep.cli import HELP
from lockstep.config.flags import Flag, arg, flags_of
from lockstep.config.schema import TrainConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.plan.options import LaunchOptions, RestartOptions

T = TypeVar("T")
FLAG = re.compile(r"-[^\d.\s-]\S*|--[^\s-]\S*")  # not -1, "-" or text with spaces
WANTED = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path"}
TORCHRUN_FLAGS = {"--nproc-per-node": "-np", "--nnodes": "--nodes"}
FieldPath = tuple[str, ...]  # names of nested fields, from the command to a value
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
    json: bool = False
    """Print how the job ended as JSON."""


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


def read(kind: type[T], command: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Parse arguments into a dataclass; the last value of a repeated flag wins.

    Args:
        default: An instance with the values of omitted arguments. Default: the defaults of the fields.

    Raises:
        ConfigError: An argument is unknown, missing or invalid, or the dataclass rejects its values.
    """
    flags = flags_of(typing.cast(type, kind))
    values, typed, plain = parse_flags(flags, f"lockstep {command}", arguments)
    values |= _positional_values(flags, f"lockstep {command}", plain, is_required=default is None)
    try:
        return typing.cast(T, _build(kind, values, default, ()))
    except ConfigError as error:
        raise ConfigError(_as_typed(str(error), typed)) from None


def parse_flags(
    flags: Sequence[Flag], command: str, arguments: Sequence[str], before_command: bool = False
) -> tuple[dict[FieldPath, Any], dict[str, str], list[str]]:
    """Return the flags' values by path, the flags as typed by long name, and the other arguments.

    Args:
        before_command: Flags may be abbreviated, and end at the first other argument, which is the command to run.

    Raises:
        ConfigError: A flag is unknown or ambiguous, or its value is missing or invalid.
    """
    known = {name: flag for flag in flags for name in (*flag.names, *flag.switches)}
    rest, plain = deque(arguments), list[str]()
    values: dict[FieldPath, Any] = {}
    typed: dict[str, str] = {}
    while rest:
        argument = rest.popleft()
        if argument == "--":
            break
        if not _is_flag(argument):
            plain.append(argument)
            if before_command:
                break
            continue
        name, equals, value = argument.partition("=")
        if attached := [short for short in known if argument.startswith(short) and not argument.startswith("--")]:
            name = max(attached, key=len)  # -b8 is -b 8
            equals, value = argument.removeprefix(name) and "=", argument.removeprefix(name).removeprefix("=")
        flag_name = name.replace("_", "-") if name.startswith("--") else name
        if before_command and not attached:
            flag_name = _completed(flag_name, known)
        flag = known.get(flag_name)
        if flag is None:
            raise ConfigError(f"{name}: unknown flag; {_nearest(name, known, command)}")
        typed[flag.names[0]] = name
        if flag.is_switch:
            if equals:
                raise ConfigError(f"{argument}: {name} takes no value")
            values[flag.path] = flag.switches[flag_name]
        elif flag.is_many:
            given = [value] * bool(value or flag.count) if equals else _following(rest, flag.count)
            if flag.count and len(given) != flag.count:
                raise ConfigError(f"{name} needs a value: {flag.metavar}")
            earlier = values.get(flag.path, ()) if flag.count else ()
            values[flag.path] = (*earlier, *(_convert(flag, name, each) for each in given))
        else:
            if not equals and (not rest or not _is_value(rest[0], known)):
                raise ConfigError(f"{name} needs a value: {flag.metavar}")
            values[flag.path] = _convert(flag, name, value if equals else rest.popleft())
    return values, typed, [*plain, *rest]


def _completed(name: str, known: Mapping[str, Flag]) -> str:
    """Return the flag that an unambiguous prefix abbreviates, and any other name unchanged."""
    longer = [flag for flag in known if flag.startswith(name)]
    if name not in known and len(longer) > 1:
        raise ConfigError(f"ambiguous option: {name} could match {', '.join(longer)}")
    return longer[0] if name not in known and longer else name


def _positional_values(
    flags: Sequence[Flag], command: str, plain: Sequence[str], is_required: bool
) -> dict[FieldPath, Any]:
    """Return the values of the positional arguments by path; only the last argument may have several values."""
    rest, missing = deque(plain), list[str]()
    values: dict[FieldPath, Any] = {}
    for flag in (flag for flag in flags if flag.is_positional):
        if flag.is_many:
            given = [rest.popleft() for _ in range(len(rest))]
            if given or flag.default is MISSING:
                values[flag.path] = tuple(_convert(flag, "", each) for each in given)
        elif rest:
            values[flag.path] = _convert(flag, "", rest.popleft())
        elif flag.default is MISSING and is_required:
            missing.append(flag.metavar)
    if missing:
        raise ConfigError(f"missing {', '.join(missing)}; {_see_help(command)}")
    if rest:
        raise ConfigError(f"{rest[0]}: unexpected argument; {_see_help(command)}")
    return values


def _is_flag(argument: str) -> bool:
    return argument == "--" or FLAG.fullmatch(argument.partition("=")[0]) is not None


def _is_value(argument: str, known: Mapping[str, Flag]) -> bool:
    """Whether an argument can be the value of the flag before it, such as "--bind-to=core --report"."""
    return not _is_flag(argument) or (" " in argument and argument.partition("=")[0] not in known)


def _following(rest: deque[str], count: int) -> list[str]:
    """Remove and return the arguments up to the next flag, at most `count` unless it is 0."""
    taken = list[str]()
    while rest and not _is_flag(rest[0]) and (not count or len(taken) < count):
        taken.append(rest.popleft())
    return taken


def _convert(flag: Flag, name: str, text: str) -> Any:
    """Convert a value to the first of the flag's types that accepts it."""
    for kind in flag.kinds:
        if kind in (int, float, str, Path) and (text or kind is not Path):  # "" would be the current folder
            with suppress(ValueError):
                return kind(text)
        elif kind is bool and text in ("True", "False"):
            return text == "True"
        elif kind is NoneType and text == "None":
            return None
    for choice in flag.choices:
        if str(choice) in (text, text.upper()):
            return choice
    wanted = [*(WANTED[kind] for kind in flag.kinds if kind in WANTED), *map(str, flag.choices)]
    *others, last = wanted
    near = get_close_matches(text, wanted, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = f"{name} {text or repr(text)}".strip()
    raise ConfigError(f"{shown}: must be {', '.join(others)}{' or ' * bool(others)}{last}{hint}")


def _build(kind: type, values: Mapping[FieldPath, Any], default: Any, path: FieldPath) -> Any:
    """Build the dataclass from the values, completed by those of `default`."""
    hints = typing.get_type_hints(kind)
    arguments = {}
    for item in dataclasses.fields(kind):
        here = (*path, item.name)
        own = MISSING if default is None else getattr(default, item.name)
        if dataclasses.is_dataclass(hints[item.name]):
            arguments[item.name] = _build(hints[item.name], values, None if own is MISSING else own, here)
        elif here in values:
            arguments[item.name] = values[here]
        elif own is not MISSING:
            arguments[item.name] = own
    return kind(**arguments)


def _nearest(name: str, known: Mapping[str, Any], command: str) -> str:
    near = get_close_matches(TORCHRUN_FLAGS.get(name.replace("_", "-"), name), known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else _see_help(command)


def _see_help(command: str) -> str:
    return f"`{command} --help` lists the arguments"


def _as_typed(message: str, typed: Mapping[str, str]) -> str:
    """Replace the flag at the start of a message by the flag as typed: "-b 0: batch size must be ..."."""
    for name, written in typed.items():
        if name != written and message.startswith((f"{name} ", f"{name}:")):
            is_same = name.lstrip("-") == written.lstrip("-")
            what = "" if is_same else f"{name.removeprefix('--').replace('-', ' ')} "
            return written + message.removeprefix(name).replace(": must be", f": {what}must be", 1)
    return message
