"""The complete description of a training job, as frozen dataclasses.

One field is one flag of `lockstep train` and one line of a recipe; its help text stands beside it. Values are checked
where they are built, and the error names the flag and the fix. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from lockstep.errors import ConfigError


@dataclass(frozen=True)
class DataConfig:
    """Which images, and how they reach the worker."""

    dataset: Annotated[Positional[str], arg(metavar="DATASET|FOLDER")] = ""
    """A data set's name (see `lockstep datasets`) or a folder with train/ and val/ (or test/). Default: digits."""
    data: Annotated[str | None, arg(metavar="MODULE:FUNCTION")] = None
    """Your own data: a function that returns (training set, validation set)."""
    data_dir: Path = Path("data")
    """Where named data sets are kept."""
    download: bool = True
    """Fetch a named data set that is not there."""
    loader_workers: Annotated[int | Literal["auto"], arg(name="workers", aliases=["-j"])] = "auto"
    """Loader processes of each worker, for data that is not held in memory."""
    in_memory: Literal["auto", "always", "never"] = "auto"
    """Decode a folder once and keep it in memory. auto: when its images are small and of one size."""
    image_size: int | None = None
    """Side of the square that a folder's images are cropped to, in pixels."""
    drop_last: bool = False
    """Drop an epoch's last, smaller global batch instead of training on it."""
    skip_corrupt: bool = False
    """Leave out images that cannot be decoded, count and list them, instead of stopping."""

    def __post_init__(self) -> None:
        if self.dataset and self.data:
            raise ConfigError(f"DATASET {self.dataset!r} and --data {self.data!r} contradict: give one of them")
        if self.data and ":" not in self.data:
            raise ConfigError(f"--data takes MODULE:FUNCTION, such as mypackage.data:load; got {self.data!r}")
        if isinstance(self.loader_workers, int) and self.loader_workers < 0:
            raise ConfigError(f"--workers is a number of processes, 0 or more; got {self.loader_workers}")
        _positive("--image-size", self.image_size)

    @property
    def source(self) -> str:
        """What to train on, in one word: a name, a folder, or MODULE:FUNCTION."""
        return self.data or self.dataset or "digits"


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes to each training image, drawn from (seed, epoch, sample)."""

    shift: int = 0
    """Move by up to this many pixels each way (crop after padding); in-memory images only."""
    shift_padding: Literal["zero", "reflect"] = "zero"
    """What the shift brings in at the edge."""
    flip: bool = False
    """Mirror left to right, every second image on average."""
    rotate: float = 0.0
    """Rotate by up to this many degrees; in-memory images only."""
    zoom: float = 0.0
    """Scale by a factor from 1 - ZOOM to 1 + ZOOM; in-memory images only."""
    shear: float = 0.0
    """Slant by up to this many degrees; in-memory images only."""
    cutout: int = 0
    """Blank a square of this many pixels; in-memory images only."""
    min_crop: float = 0.08
    """Smallest share of the area that the random crop of a folder's image keeps."""

    def __post_init__(self) -> None:
        for flag, value in (("--shift", self.shift), ("--cutout", self.cutout)):
            if value < 0:
                raise ConfigError(f"{flag} must be 0 or more; got {value}")
        for flag, angle in (("--rotate", self.rotate), ("--shear", self.shear)):
            if not 0 <= angle < 90:
                raise ConfigError(f"{flag} is an angle in degrees, at least 0 and below 90; got {angle}")
        if not 0 <= self.zoom < 1:
            raise ConfigError(f"--zoom must be at least 0 and below 1; got {self.zoom}")
        if not 0 < self.min_crop <= 1:
            raise ConfigError(f"--min-crop is a share of the area, above 0 and up to 1; got {self.min_crop}")


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    arch: Annotated[str, arg(aliases=["-a", "--model"], metavar="NAME|MODULE:FUNCTION")] = "digits-net"
    """A model's name (see `lockstep models`), or your own function, called with num_classes=N."""
    channels_last: bool = False
    """Keep tensors in NHWC order in memory; faster on most hardware for convolutions."""
    compile: bool = False
    """Compile the training step's model with torch.compile."""
    ema_decay: float = 0.0
    """Average the weights with this decay a step and evaluate the average; 0 is off, 0.999 is usual."""

    def __post_init__(self) -> None:
        if not 0 <= self.ema_decay < 1:
            raise ConfigError(f"--ema-decay must be at least 0 and below 1; got {self.ema_decay}")


@dataclass(frozen=True)
class OptimConfig:
    """How a step changes the weights."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """sgd has Nesterov momentum (unless --no-nesterov)."""
    lr: float = 0.1
    """Peak learning rate at a global batch of --lr-base-batch samples."""
    lr_base_batch: int = 128
    """Global batch that --lr is meant for."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate grows when the global batch does."""
    momentum: float = 0.9
    """SGD's momentum; Adam's and AdamW's first beta."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 5e-4
    """Weight decay (decoupled for adamw, L2 for the others)."""
    decay_all: bool = True
    """Decay every parameter; --no-decay-all spares norms and biases."""
    schedule: Literal["cosine", "onecycle", "step", "constant"] = "cosine"
    """Course of the rate after the warm-up."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate climbs linearly to its peak."""
    lr_milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule lowers the rate."""
    lr_gamma: float = 0.1
    """Factor by which the step schedule lowers it."""
    lr_final: float = 0.0
    """Share of the peak that cosine and onecycle end at."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over all classes."""
    clip_norm: float = 0.0
    """Largest norm of the whole gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        for flag, value in (("--lr", self.lr), ("--lr-base-batch", self.lr_base_batch)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{flag} must be above 0; got {value}")
        for flag, value in (
            ("--weight-decay", self.weight_decay),
            ("--warmup-epochs", self.warmup_epochs),
            ("--clip-norm", self.clip_norm),
        ):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{flag} must be 0 or more; got {value}")
        for flag, value in (("--momentum", self.momentum), ("--label-smoothing", self.label_smoothing)):
            if not 0 <= value < 1:
                raise ConfigError(f"{flag} must be at least 0 and below 1; got {value}")
        if any(b <= a for a, b in zip(self.lr_milestones, self.lr_milestones[1:], strict=False)):
            raise ConfigError(f"--lr-milestones must rise; got {self.lr_milestones}")


@dataclass(frozen=True)
class RunConfig:
    """What is kept of the run, and when."""

    run_dir: Path | None = None
    """The run's folder. Default: runs/DATASET-ARCH-TIME."""
    resume: str | None = None
    """Go on from a run folder, a checkpoint folder, or the newest one (auto)."""
    evaluate: Annotated[bool, arg(aliases=["-e"])] = False
    """Only evaluate the checkpoint named by --resume."""
    checkpoint_epochs: int = 1
    """Write a checkpoint every so many epochs; 0 only at the end."""
    checkpoint_steps: int = 0
    """Write a checkpoint every so many steps as well; 0 does not."""
    keep: int = 3
    """Checkpoints to keep, newest first; the best by top-1 is kept besides."""
    log_every: int = 20
    """Steps between two records of the training loss."""
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Where figures go besides metrics.jsonl."""

    def __post_init__(self) -> None:
        _positive("--keep", self.keep)
        _positive("--log-every", self.log_every)
        for flag, value in (
            ("--checkpoint-epochs", self.checkpoint_epochs),
            ("--checkpoint-steps", self.checkpoint_steps),
        ):
            if value < 0:
                raise ConfigError(f"{flag} must be 0 or more; got {value}")
        if self.evaluate and not self.resume:
            raise ConfigError("--evaluate needs a checkpoint: add --resume PATH, or use `lockstep eval PATH`")


@dataclass(frozen=True)
class TrainConfig:
    """A training job: everything that decides its result."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    epochs: int = 10
    """Passes over the training set."""
    max_steps: int | None = None
    """Stop after this many optimizer steps in all; the schedule keeps the length that --epochs gives it."""
    batch_size: Annotated[int | None, arg(aliases=["-b"])] = None
    """Samples of one worker in one forward pass."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all workers; replaces --batch-size."""
    accumulate: int = 1
    """Forward passes in one optimizer step."""
    seed: int = 0
    """Decides the order of samples, the augmentation and the initial weights."""
    strategy: Literal["auto", "single", "ddp"] = "auto"
    """How replicas are kept equal. auto: single for one worker, ddp for more."""
    find_unused_parameters: bool = False
    """Let ddp find parameters that a step does not use (costs a little each step)."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: autocast to bfloat16. fp64: everything in double precision, to check results."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--epochs", self.epochs),
            ("--max-steps", self.max_steps),
            ("--batch-size", self.batch_size),
            ("--global-batch-size", self.global_batch_size),
            ("--accumulate", self.accumulate),
        ):
            _positive(flag, value)
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ConfigError("--batch-size (per worker) and --global-batch-size contradict: give one of them")
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more; got {self.seed}")


def check_workers(config: TrainConfig, workers: int) -> None:
    """Refuse a configuration that contradicts the number of workers.

    Raises:
        ConfigError: The strategy is for one worker, or the global batch has no sample for some forward pass.
    """
    if config.strategy == "single" and workers > 1:
        raise ConfigError(
            f"--strategy single is for one worker, but there are {workers}, and each would train a model of its own; "
            f"use --strategy ddp"
        )
    least = workers * config.accumulate
    if config.global_batch_size is not None and config.global_batch_size < least:
        raise ConfigError(
            f"--global-batch-size {config.global_batch_size} is less than one sample for each of {workers} workers in "
            f"each of {config.accumulate} forward passes; make it {least} or more"
        )


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} must be 1 or more; got {value}")


def to_mapping(config: Any) -> dict[str, Any]:
    """The configuration as plain nested dictionaries, lists and scalars, ready for YAML or JSON."""
    result: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            value = to_mapping(value)
        elif isinstance(value, Path):
            value = str(value)
        elif isinstance(value, tuple):
            value = list(value)
        result[item.name] = value
    return result


def from_mapping(values: Mapping[str, Any], origin: str) -> TrainConfig:
    """Build a configuration from a recipe's mapping.

    Args:
        values: Nested as `to_mapping` gives it; what is absent keeps its default.
        origin: The recipe's name or file, for messages.

    Raises:
        ConfigError: An unknown key (the message names the nearest one) or a value of the wrong type.
    """
    config: TrainConfig = _build(TrainConfig, values, origin, "")
    return config


def _build(cls: Any, values: Any, origin: str, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: {path.rstrip('.') or 'the file'} must be a mapping, not {values!r}")
    hints = typing.get_type_hints(cls)
    arguments = {}
    for key, value in values.items():
        if key not in hints:
            near = get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"known are: {', '.join(hints)}"
            raise ConfigError(f"{origin}: unknown field {path}{key}; {hint}")
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, origin, f"{path}{key}.")
        else:
            matches = list(_convert(value, hints[key]))
            if not matches:
                raise ConfigError(f"{origin}: {path}{key} is {value!r}, but must be {_describe(hints[key])}")
            arguments[key] = matches[0]
    try:
        return cls(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _convert(value: Any, hint: Any) -> Iterator[Any]:
    """Yield `value` as the type `hint` wants it; nothing where it does not fit."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            yield from _convert(value, option)
    elif origin is Literal:
        if value in options:
            yield value
    elif origin is tuple:
        if isinstance(value, list):
            items = [list(_convert(item, options[0])) for item in value]
            if all(items):
                yield tuple(item[0] for item in items)
    elif hint is float:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError):
                yield float(value)  # YAML 1.1 reads 1e-4, without a point, as a string
    elif hint is Path:
        if isinstance(value, str):
            yield Path(value)
    elif isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        yield value


def _describe(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in options)
    if origin is Literal:
        return " or ".join(repr(option) for option in options)
    if origin is tuple:
        return f"a list of {_describe(options[0])}"
    return {
        type(None): "null",
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
    }.get(hint, "a path")
