"""The configuration of a training job, as frozen dataclasses.

Each field is a flag of `lockstep train` and a key of a recipe; the string below it is its help text. Values are checked
on construction, and the error names the flag and the fix. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from lockstep.config.flags import Positional, arg
from lockstep.config.values import parse_time_limit
from lockstep.errors import ConfigError, require

DeviceChoice = Literal["auto", "cpu", "gpu", "cuda", "xpu", "mps"]
"""Values of --device; "gpu" is any kind of accelerator."""
BackendChoice = Literal["auto", "gloo", "nccl", "xccl"]
"""Values of --dist-backend; "auto" is the accelerator's library, or Gloo for the CPU."""
MAX_BITS = 31
"""Of an integer pixel in Pillow, without its sign."""


@dataclass(frozen=True)
class DataConfig:
    """The data set, and how it is loaded."""

    dataset: Annotated[Positional[str], arg(metavar="DATASET|FOLDER")] = ""
    """Data set (see `lockstep datasets`) or image folder. Default: digits."""
    data: Annotated[str | None, arg(metavar="MODULE:FUNCTION")] = None
    """Custom data: a function that returns (training set, validation set)."""
    data_dir: Path = Path("data")
    """Folder for downloaded data sets."""
    download: bool = True
    """Download the data set if it is missing."""
    loader_workers: Annotated[int | Literal["auto"], arg(name="workers", aliases=["-j"])] = "auto"
    """Loader processes per worker; auto: one per core, at most 8."""
    in_memory: Literal["auto", "always", "never"] = "auto"
    """Decode a folder once and keep it in memory; auto: if small enough."""
    image_size: int | None = None
    """Side of the square crop of a folder's images, in pixels."""
    bits: Annotated[int | None, arg(metavar="N")] = None
    """Bits used in 16-bit gray images, such as 12. Default: the pack's, or 16."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Device that decodes a folder's training images; gpu: JPEG on NVIDIA."""
    drop_last: bool = False
    """Drop the last global batch of an epoch if it is smaller."""
    skip_corrupt: bool = False
    """Skip and list images that cannot be decoded, instead of failing."""

    def __post_init__(self) -> None:
        if self.dataset and self.data:
            raise ConfigError(f"DATASET {self.dataset!r} and --data {self.data!r} contradict each other; use only one")
        if self.data:
            require(":" in self.data, "--data", self.data, "MODULE:FUNCTION, such as mypackage.data:load")
        require(
            self.loader_workers == "auto" or self.loader_workers >= 0, "--workers", self.loader_workers, "at least 0"
        )
        _at_least(1, self, "image_size")
        require(self.bits is None or 1 <= self.bits <= MAX_BITS, "--bits", self.bits, f"between 1 and {MAX_BITS}")

    @property
    def source(self) -> str:
        """The data set as a name, a folder, or MODULE:FUNCTION."""
        return self.data or self.dataset or "digits"


@dataclass(frozen=True)
class AugmentConfig:
    """Random transforms of training images, determined by (seed, epoch, sample)."""

    shift: int = 0
    """Shift in-memory images by up to this many pixels in each direction."""
    shift_padding: Literal["zero", "reflect"] = "zero"
    """Padding at the edges of shifted images."""
    flip: bool = False
    """Mirror images left to right with probability 1/2."""
    flip_alternate: bool = False
    """With --flip: mirror each image in alternate epochs instead of randomly."""
    rotate: float = 0.0
    """Rotate in-memory images by up to this many degrees."""
    zoom: float = 0.0
    """Scale in-memory images by a factor between 1 - ZOOM and 1 + ZOOM."""
    shear: float = 0.0
    """Shear in-memory images by up to this many degrees."""
    cutout: int = 0
    """Blank a square of this side, in pixels, in in-memory images."""
    min_crop: float = 0.08
    """Smallest fraction of a folder image's area kept by random crops."""
    rand_augment: int = 0
    """RandAugment: number of random transforms per image; typically 2."""
    rand_augment_magnitude: int = 9
    """Strength of RandAugment's transforms, from 0 to 30."""
    trivial_augment: bool = False
    """TrivialAugment: apply one random transform of random strength to each image."""
    random_erasing: Annotated[float, arg(metavar="P")] = 0.0
    """Probability of blanking a random rectangle; typically 0.1."""
    mixup: float = 0.0
    """Mixup: blend pairs of images with weights from Beta(MIXUP, MIXUP); typically 0.2."""
    cutmix: float = 0.0
    """CutMix: swap rectangles with areas from Beta(CUTMIX, CUTMIX); typically 1."""

    def __post_init__(self) -> None:
        _at_least(0, self, "shift", "cutout", "rand_augment", "mixup", "cutmix", finite=True)
        for flag, angle in (("--rotate", self.rotate), ("--shear", self.shear)):
            require(0 <= angle < 90, flag, angle, "at least 0 and below 90 degrees")
        require(0 <= self.zoom < 1, "--zoom", self.zoom, "at least 0 and below 1")
        require(0 < self.min_crop <= 1, "--min-crop", self.min_crop, "above 0 and at most 1")
        if self.rand_augment_magnitude != 9 and not self.rand_augment:
            raise ConfigError("--rand-augment-magnitude needs --rand-augment N")
        magnitude = self.rand_augment_magnitude
        require(0 <= magnitude <= 30, "--rand-augment-magnitude", magnitude, "between 0 and 30")
        if self.trivial_augment and self.rand_augment:
            raise ConfigError("--trivial-augment cannot be combined with --rand-augment; remove one of them")
        require(0 <= self.random_erasing <= 1, "--random-erasing", self.random_erasing, "between 0 and 1")
        if self.flip_alternate and not self.flip:
            raise ConfigError("--flip-alternate needs --flip")


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    arch: Annotated[str, arg(aliases=["-a", "--model"], metavar="MODEL")] = "digits-net"
    """Model (see `lockstep models`) or MODULE:FUNCTION."""
    pretrained: Annotated[str | None, arg(metavar="default|FILE")] = None
    """Initial weights: torchvision's published ones (default) or a file."""
    freeze: Annotated[tuple[str, ...], arg(metavar="PATTERN")] = ()
    """Parameters not to train: module names or globs, such as 'layer[12].*'."""
    channels_last: bool = False
    """Use the NHWC memory format, which speeds up most convolutions."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graph: bool = False
    """Launch the forward and backward pass as CUDA graphs: for small models."""
    ema_decay: float = 0.0
    """Evaluate an exponential moving average of the weights; 0: off, typically 0.999."""

    def __post_init__(self) -> None:
        require(0 <= self.ema_decay < 1, "--ema-decay", self.ema_decay, "at least 0 and below 1")

    @property
    def is_custom(self) -> bool:
        """Whether the model is given as MODULE:NAME, instead of a name of `lockstep models`."""
        return ":" in self.arch


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and the learning rate schedule."""

    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb", "muon"] = "sgd"
    """Optimizer; lars and lamb are for large batches."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 0.1
    """Peak learning rate for a batch of --lr-base-batch."""
    lr_base_batch: int = 128
    """Global batch size that --lr refers to."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """Scaling of the learning rate with the global batch size."""
    momentum: float = 0.9
    """Momentum of sgd and lars, or beta1 of the other optimizers."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 5e-4
    """Weight decay: L2 for sgd and adam, else decoupled."""
    decay_all: bool = True
    """Apply weight decay to norms and biases too."""
    schedule: Literal["cosine", "onecycle", "step", "constant"] = "cosine"
    """Learning rate schedule after warm-up."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up; with 0, onecycle uses a quarter of the run."""
    lr_milestones: tuple[float, ...] = (30.0, 60.0, 80.0)
    """Epochs at which the step schedule lowers the learning rate."""
    lr_gamma: float = 0.1
    """Factor of the step schedule at each milestone."""
    lr_final: float = 0.0
    """Final learning rate of cosine and onecycle, as a fraction of the peak."""
    label_smoothing: float = 0.0
    """Label smoothing."""
    clip_norm: float = 0.0
    """Clip the gradient to this norm; 0: no clipping."""

    def __post_init__(self) -> None:
        for flag, value in (("--lr", self.lr), ("--lr-base-batch", self.lr_base_batch)):
            require(0 < value < math.inf, flag, value, "above 0")
        _at_least(0, self, "weight_decay", "warmup_epochs", "lr_gamma", "lr_final", "clip_norm", finite=True)
        for flag, value in (("--momentum", self.momentum), ("--label-smoothing", self.label_smoothing)):
            require(0 <= value < 1, flag, value, "at least 0 and below 1")
        given = " ".join(f"{epoch:g}" for epoch in self.lr_milestones)
        is_rising = all(a < b for a, b in pairwise(self.lr_milestones)) and min(self.lr_milestones, default=0) >= 0
        require(is_rising, "--lr-milestones", given, "at least 0 and in ascending order")


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel strategy and its communication."""

    strategy: Literal["auto", "single", "dp", "ddp", "horovod"] = "auto"
    """Parallel strategy; auto: ddp for several workers, else single."""
    find_unused_parameters: bool = False
    """With ddp: find parameters that a step does not use, at some cost."""
    sync_bn: bool = False
    """Synchronize batch norm statistics across workers."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Gradient compression; powersgd requires ddp."""
    powersgd_rank: int = 4
    """Rank of PowerSGD's approximation; a higher rank sends more bytes."""
    shard_optimizer: bool = False
    """With ddp: shard the optimizer's state across workers (ZeRO stage 1)."""
    dist_backend: BackendChoice = "auto"
    """Communication backend; auto: nccl or xccl for GPUs, gloo for CPUs."""
    balance: bool = False
    """Let the workers' shares of a step follow their speeds."""
    check_replicas: Annotated[int, arg(metavar="STEPS")] = 100
    """Steps between checks that all workers have equal weights; 0: off."""

    def __post_init__(self) -> None:
        _at_least(0, self, "check_replicas")
        _at_least(1, self, "powersgd_rank")
        if self.powersgd_rank != 4 and self.compress != "powersgd":
            raise ConfigError(f"--powersgd-rank is for --compress powersgd, but --compress is {self.compress}")
        if self.balance and self.compress == "powersgd":
            raise ConfigError(
                "--balance: --compress powersgd waits in the backward pass, so no speed can be measured; leave out one "
                "of the two"
            )
        if self.strategy in ("single", "dp"):
            for flag, value in (
                ("--compress", self.compress != "none"),
                ("--shard-optimizer", self.shard_optimizer),
                ("--find-unused-parameters", self.find_unused_parameters),
                ("--sync-bn", self.sync_bn and self.strategy == "dp"),
                ("--balance", self.balance),
            ):
                if value:
                    raise ConfigError(f"{flag} is for several workers, but --strategy is {self.strategy}; use ddp")
        if self.strategy == "horovod":
            for flag, value in (
                ("--compress powersgd", self.compress == "powersgd"),
                ("--shard-optimizer", self.shard_optimizer),
                ("--find-unused-parameters", self.find_unused_parameters),
            ):
                if value:
                    raise ConfigError(f"{flag} needs --strategy ddp, not horovod")


@dataclass(frozen=True)
class NumericsConfig:
    """The number formats of a step."""

    precision: Annotated[
        Literal["fp32", "tf32", "bf16", "fp64", "O0", "O1", "O2", "O3"], arg(aliases=["--opt-level"])
    ] = "fp32"
    """bf16, O1: autocast. O2: fp16, fp32 weights. O3: fp16."""
    loss_scale: float | Literal["dynamic"] | None = None
    """Loss scale for fp16. Default: dynamic for O1 and O2, 1 for O3."""
    keep_batchnorm_fp32: bool | None = None
    """Keep batch norm in fp32. Default: True for O2, False for O3."""
    on_nan: Literal["stop", "skip"] = "stop"
    """If a gradient is NaN or infinite: stop, or skip the step."""

    def __post_init__(self) -> None:
        require(self.on_nan in ("stop", "skip"), "--on-nan", self.on_nan, "stop or skip")  # `fit` passes any value
        if isinstance(self.loss_scale, float | int):
            require(0 < self.loss_scale < math.inf, "--loss-scale", self.loss_scale, "above 0, or dynamic")
        if self.loss_scale not in (None, 1.0) and self.precision not in ("O1", "O2", "O3"):
            raise ConfigError(f"--loss-scale is for fp16 (O1, O2, O3), but --precision is {self.precision}")
        if self.keep_batchnorm_fp32 is not None and self.precision not in ("O2", "O3"):
            raise ConfigError(f"--keep-batchnorm-fp32 is for O2 and O3, but --precision is {self.precision}")


@dataclass(frozen=True)
class RunConfig:
    """The run folder: what is written to it, and when."""

    run_dir: Path | None = None
    """Run folder. Default: runs/DATASET-ARCH-TIME."""
    resume: Annotated[str | None, arg(aliases=["-r"], metavar="RUN|auto")] = None
    """Resume a run folder or checkpoint; auto: the newest run."""
    start_epoch: int | None = None
    """First epoch, from 0. Default: the checkpoint's next epoch."""
    evaluate: Annotated[bool, arg(aliases=["-e"])] = False
    """Only evaluate the weights given by --resume or --pretrained."""
    desired_acc: float | None = None
    """Stop at this top-1 accuracy, such as 0.75, and print the time to reach it."""
    time_limit: Annotated[str | None, arg(metavar="TIME")] = None
    """Checkpoint and stop before this limit, or none. Default: the batch job's limit."""
    checkpoint_epochs: int = 1
    """Epochs between checkpoints; 0: only at the end."""
    checkpoint_steps: int = 0
    """Steps between additional checkpoints; 0: none."""
    snapshot_steps: int | None = None
    """With --max-restarts: steps between in-memory snapshots; 0: none. Default: as --log-every."""
    keep: int = 3
    """Number of newest checkpoints to keep, besides the best."""
    log_every: Annotated[int, arg(aliases=["--print-freq", "-p"])] = 20
    """Steps between records of the training loss."""
    io_every: Annotated[float, arg(metavar="SECONDS")] = 5.0
    """Seconds between records of I/O counters; 0: none."""
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Experiment trackers besides metrics.jsonl."""
    quiet: Annotated[bool, arg(aliases=["-q"])] = False
    """Print only warnings, errors and the result."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """Also print checkpoints and every recorded step."""

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose contradict each other; use one of them")
        if self.run_dir and os.path.realpath(self.run_dir) == os.sep:
            raise ConfigError(f"--run-dir {self.run_dir}: is the root of the file system; choose another folder")
        _at_least(1, self, "keep", "log_every")
        _at_least(0, self, "checkpoint_epochs", "checkpoint_steps", "snapshot_steps", "start_epoch")
        require(0 <= self.io_every < math.inf, "--io-every", self.io_every, "at least 0 seconds")
        if self.time_limit is not None:
            try:
                parse_time_limit(self.time_limit)
            except ValueError as error:
                raise ConfigError(f"--time-limit {error}") from None
        if self.desired_acc is not None:
            require(0 < self.desired_acc <= 1, "--desired-acc", self.desired_acc, "above 0 and at most 1, such as 0.75")


@dataclass(frozen=True)
class TrainConfig:
    """A training job: everything that determines its result."""

    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    run: RunConfig = field(default_factory=RunConfig)
    epochs: int = 10
    """Passes over the training set."""
    max_steps: int | None = None
    """Stop after this many optimizer steps; does not shorten the schedule."""
    batch_size: Annotated[int | None, arg(aliases=["-b"])] = None
    """Samples per worker and forward pass."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all workers, instead of --batch-size."""
    batch_workers: int | None = None
    """Number of workers that --batch-size refers to; keeps the global batch size."""
    accumulate: int = 1
    """Forward passes per optimizer step."""
    seed: int = 0
    """Seed of sample order, augmentation and initial weights."""
    device: DeviceChoice = "auto"
    """Device; auto: the GPU if there is one."""

    def _check_weights(self) -> None:
        """Reject two sources of initial weights, and an evaluation without weights."""
        resume, pretrained = self.run.resume, self.model.pretrained
        if pretrained and resume not in (None, "auto"):
            raise ConfigError(
                f"--pretrained {pretrained} and --resume {resume} both specify the initial weights; use one of them "
                f"(--resume auto can be combined with --pretrained, which then applies if there is no run to resume)"
            )
        if self.run.evaluate and not (resume or pretrained):
            raise ConfigError(
                "--evaluate needs a checkpoint: add --resume PATH or --pretrained default|FILE, or use "
                "`lockstep eval PATH`"
            )

    def __post_init__(self) -> None:
        self._check_weights()
        _at_least(1, self, "epochs", "max_steps", "batch_size", "global_batch_size", "batch_workers", "accumulate")
        if self.global_batch_size is not None and self.batch_workers is not None:
            raise ConfigError("--batch-workers needs --batch-size; --global-batch-size is for any number of workers")
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ConfigError("--batch-size (per worker) and --global-batch-size contradict each other; use only one")
        _at_least(0, self, "seed")
        if self.parallel.strategy == "dp" and self.model.compile:
            raise ConfigError(
                "--compile cannot be combined with --strategy dp, which copies its replicas in each step; use ddp"
            )
        self._check_formats()

    def _check_formats(self) -> None:
        """Reject options that the number formats do not support."""
        precision, keeps_norms = self.numerics.precision, self.numerics.keep_batchnorm_fp32
        half_norms = (precision == "O3" and not keeps_norms) or (precision == "O2" and keeps_norms is False)
        if self.parallel.sync_bn and half_norms:
            raise ConfigError("--sync-bn computes sums that fp16 cannot hold; add --keep-batchnorm-fp32 True")
        if self.parallel.compress == "powersgd" and precision in ("O2", "O3"):
            raise ConfigError(
                f"--compress powersgd needs gradients in fp32, but --precision is {precision}; use O1 or bf16"
            )
        if precision == "O3":
            adaptive = self.optim.optimizer in ("adam", "adamw", "lamb", "muon")
            if adaptive or self.model.ema_decay:
                flag = f"--optimizer {self.optim.optimizer}" if adaptive else "--ema-decay"
                sgd = " or --optimizer sgd" if adaptive else ""
                raise ConfigError(
                    f"{flag} keeps sums that fp16 cannot hold, but --precision is O3, which uses only fp16; use O2{sgd}"
                )


def check_workers(config: TrainConfig, workers: int) -> None:
    """Reject a configuration that does not support the number of workers.

    Raises:
        ConfigError: The strategy is for one worker, or the global batch is too small for each forward pass to have a
            sample (a pair with mixup or cutmix).
    """
    strategy = config.parallel.strategy
    if strategy in ("single", "dp") and workers > 1:
        raise ConfigError(
            f"--strategy {strategy} is for one worker, but there are {workers}, which would train separate models; use "
            f"--strategy ddp"
        )
    mixes = config.augment.mixup > 0 or config.augment.cutmix > 0
    unit, samples = ("pair", 2) if mixes else ("sample", 1)
    least = workers * config.accumulate * samples
    if config.batch_workers is not None and config.batch_size is not None:
        total = config.batch_size * config.batch_workers * config.accumulate
        if total < least:
            raise ConfigError(
                f"--batch-size {config.batch_size} for --batch-workers {config.batch_workers} is less than one {unit} "
                f"for each of {workers} workers; lower -np (or --max-np), or raise --batch-size"
            )
    if config.global_batch_size is not None and config.global_batch_size < least:
        raise ConfigError(
            f"--global-batch-size {config.global_batch_size} is less than one {unit} for each of {workers} workers in "
            f"each of {config.accumulate} forward passes; make it {least} or more"
        )


def _at_least(least: int, config: object, *names: str, finite: bool = False) -> None:
    """Check numbers whose flags have the fields' names; a field with the default None may be None."""
    for name in names:
        value, default = getattr(config, name), getattr(type(config), name)
        is_met = default is None if value is None else least <= value and not (finite and math.isinf(value))
        require(is_met, f"--{name.replace('_', '-')}", value, f"at least {least}")
