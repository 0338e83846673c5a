"""The complete description of a training job, as frozen dataclasses.

One field is one flag of `lockstep train` and one line of a recipe; its help text stands beside it. Values are checked
where they are built, and the error names the flag and the fix. Nothing here imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from lockstep.config.device_choice import BackendChoice, DeviceChoice
from lockstep.config.time_limit import parse_time_limit
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
    """Loader processes of each worker, for data that is not held in memory; auto measures how many help."""
    in_memory: Literal["auto", "always", "never"] = "auto"
    """Decode a folder once and keep it in memory. auto: when its images are small and of one size."""
    image_size: int | None = None
    """Side of the square that a folder's images are cropped to, in pixels."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Where a folder's training images are decoded: gpu is for JPEG, on NVIDIA GPUs."""
    progressive_sizes: Annotated[tuple[str, ...], arg(metavar="EPOCH:SIDE")] = ()
    """Train on smaller images at first: from EPOCH (0 is the first) on, squares of SIDE pixels, as 0:128 30:224."""
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
        self.sizes_by_epoch  # noqa: B018  (checks them)

    @property
    def sizes_by_epoch(self) -> dict[int, int]:
        """The side of training images, in pixels, from each named epoch on.

        Raises:
            ConfigError: A pair is malformed, or the epochs do not start at 0 and rise.
        """
        try:
            pairs = [(int(epoch), int(side)) for epoch, side in (pair.split(":") for pair in self.progressive_sizes)]
        except ValueError:
            pairs = [(-1, 0)]
        epochs = [epoch for epoch, _ in pairs]
        if pairs and (epochs != sorted(set(epochs)) or epochs[0] != 0 or any(side < 1 for _, side in pairs)):
            raise ConfigError(
                f"--progressive-sizes takes EPOCH:SIDE pairs with rising epochs from 0 on, such as 0:128 30:224; "
                f"got {' '.join(self.progressive_sizes)}"
            )
        return dict(pairs)

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
    flip_alternate: bool = False
    """With --flip: mirror an image in every second epoch, instead of at random."""
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
    rand_augment: int = 0
    """Random changes of colour and geometry that each image gets (RandAugment); 2 is usual."""
    rand_augment_magnitude: int = 9
    """How strong they are, from 0 to 30."""
    trivial_augment: bool = False
    """One random change of color or geometry to each image, at a random strength (TrivialAugment)."""
    random_erasing: Annotated[float, arg(metavar="P")] = 0.0
    """Blank a random rectangle in this share of the images; 0.1 is usual."""
    mixup: float = 0.0
    """Blend pairs of images, by shares drawn from Beta(MIXUP, MIXUP); 0.2 is usual."""
    cutmix: float = 0.0
    """Exchange rectangles between pairs of images, by areas drawn from Beta(CUTMIX, CUTMIX); 1 is usual."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--shift", self.shift),
            ("--cutout", self.cutout),
            ("--rand-augment", self.rand_augment),
            ("--mixup", self.mixup),
            ("--cutmix", self.cutmix),
        ):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{flag} must be 0 or more; got {value}")
        for flag, angle in (("--rotate", self.rotate), ("--shear", self.shear)):
            if not 0 <= angle < 90:
                raise ConfigError(f"{flag} is an angle in degrees, at least 0 and below 90; got {angle}")
        if not 0 <= self.zoom < 1:
            raise ConfigError(f"--zoom must be at least 0 and below 1; got {self.zoom}")
        if not 0 < self.min_crop <= 1:
            raise ConfigError(f"--min-crop is a share of the area, above 0 and up to 1; got {self.min_crop}")
        if self.rand_augment_magnitude != 9 and not self.rand_augment:
            raise ConfigError("--rand-augment-magnitude is for --rand-augment N, which is not given")
        if not 0 <= self.rand_augment_magnitude <= 30:
            raise ConfigError(f"--rand-augment-magnitude must be from 0 to 30; got {self.rand_augment_magnitude}")
        if self.trivial_augment and self.rand_augment:
            raise ConfigError(
                "--trivial-augment and --rand-augment both choose how to change an image: leave one of them out"
            )
        if not 0 <= self.random_erasing <= 1:
            raise ConfigError(f"--random-erasing is a share of the images, from 0 to 1; got {self.random_erasing}")
        if self.flip_alternate and not self.flip:
            raise ConfigError("--flip-alternate says how to flip: add --flip")


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    arch: Annotated[str, arg(aliases=["-a", "--model"], metavar="NAME|MODULE:FUNCTION")] = "digits-net"
    """A model's name (see `lockstep models`), or your own function, called with num_classes=N."""
    pretrained: Annotated[str | None, arg(metavar="default|FILE")] = None
    """Start from these weights: torchvision's published ones (default), or those in a file."""
    freeze: Annotated[tuple[str, ...], arg(metavar="PATTERN")] = ()
    """Parameters to leave as they are: names of modules or globs, such as backbone or 'layer[12].*'."""
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

    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "sgd"
    """sgd has Nesterov momentum (unless --no-nesterov); lars and lamb are for large batches."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 0.1
    """Peak learning rate at a global batch of --lr-base-batch samples."""
    lr_base_batch: int = 128
    """Global batch that --lr is meant for."""
    lr_scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate grows when the global batch does."""
    momentum: float = 0.9
    """Momentum of sgd and lars; first beta of the others."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    weight_decay: Annotated[float, arg(aliases=["--wd"])] = 5e-4
    """Weight decay (L2 for sgd and adam, decoupled for the others)."""
    decay_all: bool = True
    """Decay every parameter; --no-decay-all spares norms and biases."""
    schedule: Literal["cosine", "onecycle", "step", "constant"] = "cosine"
    """Course of the rate after the warm-up."""
    warmup_epochs: float = 0.0
    """Epochs in which the rate climbs linearly to its peak; at 0, onecycle climbs for a quarter of the run."""
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
class ParallelConfig:
    """How replicas are kept equal."""

    strategy: Literal["auto", "single", "dp", "ddp", "horovod"] = "auto"
    """auto: single for one worker, ddp for more. dp: one worker that uses all GPUs it sees."""
    find_unused_parameters: bool = False
    """Let ddp find parameters that a step does not use (costs a little each step)."""
    sync_bn: bool = False
    """Take batch norm's statistics over all workers' samples."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How gradients travel: whole, in half the bytes, or as low-rank factors (powersgd, with ddp)."""
    powersgd_rank: int = 4
    """Rank of PowerSGD's factors: bytes grow with it, and so does fidelity."""
    shard_optimizer: bool = False
    """Keep a share of the optimizer's state on each worker (ZeRO stage 1), with ddp."""
    dist_backend: BackendChoice = "auto"
    """What carries the gradients. auto: the GPUs' own library (nccl, Intel's xccl), gloo between CPUs. By gloo, workers
    may share a GPU."""
    check_replicas: Annotated[int, arg(metavar="STEPS")] = 100
    """Compare the workers' weights every so many steps, and before each checkpoint; 0 does not."""

    def __post_init__(self) -> None:
        if self.check_replicas < 0:
            raise ConfigError(f"--check-replicas is a number of steps, 0 or more; got {self.check_replicas}")
        _positive("--powersgd-rank", self.powersgd_rank)
        if self.powersgd_rank != 4 and self.compress != "powersgd":
            raise ConfigError(f"--powersgd-rank is for --compress powersgd, but --compress is {self.compress}")
        if self.strategy in ("single", "dp"):
            for flag, value in (
                ("--compress", self.compress != "none"),
                ("--shard-optimizer", self.shard_optimizer),
                ("--find-unused-parameters", self.find_unused_parameters),
                ("--sync-bn", self.sync_bn and self.strategy == "dp"),
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
    """In which number formats a step computes."""

    precision: Annotated[Literal["fp32", "bf16", "fp64", "O0", "O1", "O2", "O3"], arg(aliases=["--opt-level"])] = "fp32"
    """bf16: autocast. O0: fp32. O1: fp16 autocast. O2: fp16 with fp32 master weights. O3: fp16. fp64: for checks."""
    loss_scale: float | Literal["dynamic"] | None = None
    """Factor of the loss in fp16; dynamic finds it. Default: dynamic for O1 and O2, 1 for O3."""
    keep_batchnorm_fp32: bool | None = None
    """Keep batch norm in fp32. Default: yes for O2, no for O3."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Where a gradient is NaN or infinite: skip leaves the step out, rewind goes back to the last good checkpoint."""

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, float | int) and not 0 < self.loss_scale < math.inf:
            raise ConfigError(f"--loss-scale must be above 0, or dynamic; got {self.loss_scale}")
        if self.loss_scale not in (None, 1.0) and self.precision not in ("O1", "O2", "O3"):
            raise ConfigError(f"--loss-scale is for fp16 (O1, O2, O3), but --precision is {self.precision}")
        if self.keep_batchnorm_fp32 is not None and self.precision not in ("O2", "O3"):
            raise ConfigError(f"--keep-batchnorm-fp32 is for O2 and O3, but --precision is {self.precision}")


@dataclass(frozen=True)
class RunConfig:
    """What is kept of the run, and when."""

    run_dir: Path | None = None
    """The run's folder. Default: runs/DATASET-ARCH-TIME."""
    resume: Annotated[str | None, arg(aliases=["-r"])] = None
    """Go on from a run folder, a checkpoint, an older script's checkpoint file, or the newest run (auto)."""
    start_epoch: int | None = None
    """Begin at this epoch (0 is the first), whatever epoch the checkpoint was written after."""
    evaluate: Annotated[bool, arg(aliases=["-e"])] = False
    """Only evaluate the checkpoint named by --resume, or the weights named by --pretrained."""
    desired_acc: float | None = None
    """Stop after the evaluation whose top-1 (a share, such as 0.75) reaches this, and say how long it took."""
    time_limit: Annotated[str | None, arg(metavar="TIME")] = None
    """Stop with a checkpoint before this is over ([DAYS-]HOURS:MINUTES:SECONDS, or MINUTES); none: without limit.
    Default: the batch job's, where Slurm or Torque tell it."""
    checkpoint_epochs: int = 1
    """Write a checkpoint every so many epochs; 0 only at the end."""
    checkpoint_steps: int = 0
    """Write a checkpoint every so many steps as well; 0 does not."""
    snapshot_steps: int | None = None
    """With --max-restarts: keep the state in memory every so many steps; 0 does not. Default: as --log-every."""
    keep: int = 3
    """Checkpoints to keep, newest first; the best by top-1 is kept besides."""
    log_every: Annotated[int, arg(aliases=["--print-freq", "-p"])] = 20
    """Steps between two records of the training loss."""
    io_every: Annotated[float, arg(metavar="SECONDS")] = 5.0
    """Seconds between two records of the bytes and operations read and written; 0 keeps none."""
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Where figures go besides metrics.jsonl."""
    quiet: Annotated[bool, arg(aliases=["-q"])] = False
    """Print only warnings, errors and the result."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """Also print each checkpoint, and steps on terminals and in short epochs."""

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ConfigError("--quiet and --verbose contradict: give one of them")
        _positive("--keep", self.keep)
        _positive("--log-every", self.log_every)
        for flag, value in (
            ("--checkpoint-epochs", self.checkpoint_epochs),
            ("--checkpoint-steps", self.checkpoint_steps),
            ("--snapshot-steps", self.snapshot_steps or 0),
        ):
            if value < 0:
                raise ConfigError(f"{flag} must be 0 or more; got {value}")
        if not 0 <= self.io_every < math.inf:
            raise ConfigError(f"--io-every is a number of seconds, 0 or more; got {self.io_every}")
        if self.time_limit is not None:
            try:
                parse_time_limit(self.time_limit)
            except ValueError as error:
                raise ConfigError(f"--time-limit {error}, nor the word none") from None
        if self.start_epoch is not None and self.start_epoch < 0:
            raise ConfigError(f"--start-epoch counts from 0; got {self.start_epoch}")
        if self.desired_acc is not None and not 0 < self.desired_acc <= 1:
            raise ConfigError(f"--desired-acc is a share, above 0 and up to 1, such as 0.75; got {self.desired_acc}")


@dataclass(frozen=True)
class TrainConfig:
    """A training job: everything that decides its result."""

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
    """Stop after this many optimizer steps in all; the schedule keeps the length that --epochs gives it."""
    batch_size: Annotated[int | None, arg(aliases=["-b"])] = None
    """Samples of one worker in one forward pass."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all workers; replaces --batch-size."""
    batch_workers: int | None = None
    """Workers that --batch-size is meant for, where there may be more or fewer: the global batch stays the same."""
    accumulate: int = 1
    """Forward passes in one optimizer step."""
    seed: int = 0
    """Decides the order of samples, the augmentation and the initial weights."""
    device: DeviceChoice = "auto"
    """auto: the GPU where there is one. gpu: that of any maker: cuda (NVIDIA and AMD), xpu (Intel), mps (Apple)."""

    def _check_weights(self) -> None:
        """Refuse two sources of weights, and an evaluation of none."""
        resume, pretrained = self.run.resume, self.model.pretrained
        if pretrained and resume not in (None, "auto"):
            raise ConfigError(
                f"--pretrained {pretrained} and --resume {resume} both say which weights to begin with: give one of "
                f"them (--resume auto goes with --pretrained, which is for the first start then)"
            )
        if self.run.evaluate and not (resume or pretrained):
            raise ConfigError(
                "--evaluate needs a checkpoint: add --resume PATH or --pretrained default|FILE, or use "
                "`lockstep eval PATH`"
            )

    def __post_init__(self) -> None:
        self._check_weights()
        for flag, value in (
            ("--epochs", self.epochs),
            ("--max-steps", self.max_steps),
            ("--batch-size", self.batch_size),
            ("--global-batch-size", self.global_batch_size),
            ("--batch-workers", self.batch_workers),
            ("--accumulate", self.accumulate),
        ):
            _positive(flag, value)
        if self.global_batch_size is not None and self.batch_workers is not None:
            raise ConfigError(
                "--batch-workers goes with --batch-size; --global-batch-size is for any number of workers"
            )
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ConfigError("--batch-size (per worker) and --global-batch-size contradict: give one of them")
        if self.seed < 0:
            raise ConfigError(f"--seed must be 0 or more; got {self.seed}")
        if self.parallel.strategy == "dp" and self.model.compile:
            raise ConfigError(
                "--compile does not go with --strategy dp, which makes its replicas anew each step; use ddp"
            )
        self._check_formats()

    def _check_formats(self) -> None:
        """Refuse what does not go with the number formats."""
        precision, keeps_norms = self.numerics.precision, self.numerics.keep_batchnorm_fp32
        half_norms = (precision == "O3" and not keeps_norms) or (precision == "O2" and keeps_norms is False)
        if self.parallel.sync_bn and half_norms:
            raise ConfigError("--sync-bn forms sums that fp16 cannot hold: add --keep-batchnorm-fp32 True")
        if self.parallel.compress == "powersgd" and precision in ("O2", "O3"):
            raise ConfigError(
                f"--compress powersgd needs gradients in fp32; --precision is {precision}, use O1 or bf16"
            )
        if precision == "O3":
            adaptive = self.optim.optimizer in ("adam", "adamw", "lamb")
            if adaptive or self.model.ema_decay:
                flag = f"--optimizer {self.optim.optimizer}" if adaptive else "--ema-decay"
                sgd = " or --optimizer sgd" if adaptive else ""
                raise ConfigError(
                    f"{flag} keeps sums that fp16 cannot hold, as --precision O3 would have it; use O2{sgd}"
                )


def check_workers(config: TrainConfig, workers: int) -> None:
    """Refuse a configuration that contradicts the number of workers.

    Raises:
        ConfigError: The strategy is for one worker, or the global batch has no sample for some forward pass.
    """
    strategy = config.parallel.strategy
    if strategy in ("single", "dp") and workers > 1:
        raise ConfigError(
            f"--strategy {strategy} is for one worker, but there are {workers}, and each would train a model of its "
            f"own; use --strategy ddp"
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


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} must be 1 or more; got {value}")
