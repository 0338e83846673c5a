"""`fit`: train your model on your data with Lockstep's loop, from Python."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.config.schema import BackendChoice, DeviceChoice, TrainConfig
from lockstep.data.sets import Collate, describe_custom
from lockstep.errors import ConfigError, StoppedError
from lockstep.launch.worker_exit import end_stopped
from lockstep.train.callbacks import Callback
from lockstep.train.custom import CustomParts, OptimizerFactory, SchedulerFactory
from lockstep.train.guards.checks import check_model
from lockstep.train.loop import Result
from lockstep.train.metrics import Loss, Metric
from lockstep.train.run import run_with
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

_GROUPS: dict[str, Any] = {
    name: type(group) for name, group in vars(TrainConfig()).items() if dataclasses.is_dataclass(group)
}
_OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb", "muon")
_OF_OUR_OPTIMIZERS = ("lr", "lr_base_batch", "lr_scaling", "momentum", "nesterov", "weight_decay", "decay_all")
_OF_IMAGES = ("mixup", "cutmix", "channels_last")
_OF_CLASSES = ("mixup", "cutmix", "label_smoothing", "desired_acc")
_OF_OUR_SCHEDULES = ("schedule", "warmup_epochs", "lr_milestones", "lr_gamma", "lr_final")


def fit(
    model: nn.Module,
    train_set: Any,
    val_set: Any,
    *,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    collate_fn: Collate | None = None,
    callbacks: Sequence[Callback] = (),
    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb", "muon"] | Optimizer | OptimizerFactory = "sgd",
    scheduler: LRScheduler | SchedulerFactory | None = None,
    scheduler_interval: Literal["epoch", "step"] = "epoch",
    # Duration, batches and device
    epochs: int = 10,
    max_steps: int | None = None,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    batch_workers: int | None = None,
    accumulate: int = 1,
    seed: int = 0,
    device: DeviceChoice = "auto",
    # Data
    loader_workers: int | Literal["auto"] = "auto",
    drop_last: bool = False,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    # Model
    pretrained: str | None = None,
    freeze: Sequence[str] = (),
    channels_last: bool = False,
    compile: bool = False,
    cuda_graph: bool = False,
    ema_decay: float = 0.0,
    # Optimizer and learning rate
    lr: float = 0.1,
    lr_scaling: Literal["linear", "sqrt", "none"] = "none",
    lr_base_batch: int = 128,
    momentum: float = 0.9,
    nesterov: bool = True,
    weight_decay: float = 5e-4,
    decay_all: bool = True,
    schedule: Literal["cosine", "onecycle", "step", "constant"] = "cosine",
    warmup_epochs: float = 0.0,
    lr_milestones: tuple[float, ...] = (30.0, 60.0, 80.0),
    lr_gamma: float = 0.1,
    lr_final: float = 0.0,
    label_smoothing: float = 0.0,
    clip_norm: float = 0.0,
    # Workers
    strategy: Literal["auto", "single", "dp", "ddp", "horovod"] = "auto",
    find_unused_parameters: bool = False,
    sync_bn: bool = False,
    balance: bool = False,
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none",
    powersgd_rank: int = 4,
    shard_optimizer: bool = False,
    dist_backend: BackendChoice = "auto",
    check_replicas: int = 100,
    # Number formats
    precision: Literal["fp32", "tf32", "bf16", "fp64", "O0", "O1", "O2", "O3"] = "fp32",
    loss_scale: float | Literal["dynamic"] | None = None,
    keep_batchnorm_fp32: bool | None = None,
    on_nan: Literal["stop", "skip"] = "stop",
    # Records and checkpoints
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    start_epoch: int | None = None,
    desired_acc: float | None = None,
    time_limit: str | None = None,
    checkpoint_epochs: int = 1,
    checkpoint_steps: int = 0,
    snapshot_steps: int | None = None,
    keep: int = 3,
    log_every: int = 20,
    io_every: float = 5.0,
    quiet: bool = False,
    verbose: bool = False,
    track: Sequence[Literal["tensorboard", "mlflow", "wandb"]] = ("tensorboard",),
) -> Result:
    """Train a model and return its results. Call it in a single process, or in every worker.

    Arguments that are not described here work like the `lockstep train` flag of the same name; see
    docs/reference/recipes.md.

    Args:
        model: Called as `model(inputs)`; a mapping, tuple or list of inputs is one argument. With classes, it returns
            logits [N, K]. Parameters with `requires_grad=False` are not trained. All workers start with the weights of
            worker 0.
        train_set: Map-style data set of pairs (inputs, target). Inputs are a tensor, or mappings, tuples and lists of
            tensors. Floating-point inputs get the dtype of `precision`, uint8 images [C, H, W] are scaled to the range
            0 to 1, and others, such as tokens, are used unchanged. If the first target is an integer (a number or a
            tensor without dimensions), targets are classes, with top-1, top-5 and a confusion matrix. Others, such as
            floats, masks or the next tokens, need `loss`, and the best weights are those with the lowest validation
            loss.
        val_set: The same, for evaluation.
        loss: Function of (outputs, targets), with classes of shapes [N, K] and [N], that returns the loss of each
            sample, [N], or their mean. Also computed in evaluations. None: cross-entropy.
        metrics: Functions of (outputs, targets) by name, computed in evaluations. Each returns the (sum, count) of a
            batch, as numbers or tensors of equal shape. Both are summed over batches and workers before the division.
        collate_fn: Makes (inputs, targets), tensors [N, ...] as above, of a list of N items of the data sets, of any
            form. None: torch's `default_collate`.
        callbacks: Called at the start and end of steps and epochs, and after checkpoints; see `Callback`.
        optimizer: A name; an optimizer over the model's parameters; or a function from trainable parameters to an
            optimizer, such as `torch.optim.AdamW`. The latter two set their own learning rate and weight decay.
        scheduler: A torch scheduler over that optimizer, or a function that builds one from the optimizer. `fit` calls
            its `step`, with the validation loss for ReduceLROnPlateau.
        scheduler_interval: Step the scheduler after each epoch or each optimizer step.
        epochs: Passes over the training set.
        batch_size: Samples per worker and forward pass; 64 if `global_batch_size` is not given either.
        global_batch_size: Samples per optimizer step over all workers, instead of `batch_size`.
        seed: Sets the order of samples and the random numbers of augmentation and dropout, not the initial weights.
        freeze: Names of modules, or globs of parameter names, to exclude from training. Frozen batch norms also keep
            their statistics.
        lr: The (peak) learning rate; by default independent of the batch size.
        lr_scaling: linear or sqrt: scale `lr` with the ratio of the global batch to `lr_base_batch`.
        run_dir: The run folder. None: runs/DATASET-MODEL-TIME.
        resume: A run folder or checkpoint to resume from; "auto": resume from `run_dir` if it has a checkpoint.

    Returns:
        The results of the last evaluation and the history, equal on all workers except for times, which each worker
        measures itself. The best weights, by top-1 or loss, are in the run folder's model.safetensors; `model` has the
        last ones.

    Raises:
        ConfigError: An argument is invalid or contradicts another or the data; the message names it.
        LockstepError: Training failed; see `lockstep.errors` for the subclasses.
    """
    given = dict(locals())
    own_optimizer = None if isinstance(optimizer, str) else optimizer
    if isinstance(optimizer, str) and optimizer not in _OPTIMIZERS:
        raise ConfigError(f"optimizer={optimizer!r}: must be one of {', '.join(_OPTIMIZERS)}, or an optimizer")
    _check_unused(given, "optimizer", own_optimizer, _OF_OUR_OPTIMIZERS + _OF_OUR_SCHEDULES)
    _check_unused(given, "scheduler", scheduler, _OF_OUR_SCHEDULES)
    if loss is not None and label_smoothing:
        raise ConfigError("label_smoothing= applies only to the default loss; with loss=, smooth the targets there")
    custom = CustomParts(loss, metrics or {}, callbacks, own_optimizer, scheduler, scheduler_interval)
    known = {field.name for kind in (TrainConfig, *_GROUPS.values()) for field in dataclasses.fields(kind)}
    settings = {name: value for name, value in given.items() if name in known and name != "model"}
    if own_optimizer is not None:
        del settings["optimizer"]
    config = configure(**settings)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, arch=_name_of(model)),
        data=dataclasses.replace(config.data, data=_name_of(train_set)),
    )
    data = describe_custom(type(train_set).__name__, train_set, val_set, loss is not None, collate_fn)
    _check_needs(given, data.has_images, "images as inputs", _OF_IMAGES)
    _check_needs(given, bool(data.classes), "integer classes as targets", _OF_CLASSES)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r:.80} is not a torch.nn.Module")
    check_model("model=", model, data)
    rank_info = RankInfo.from_environment()
    try:
        with connect(rank_info, config.device, config.parallel.dist_backend) as world:
            return run_with(config, world, data, model, custom=custom)
    except StoppedError as error:
        stop = str(error)  # not the error, whose traceback references the process group
    end_stopped(rank_info, stop)
    raise StoppedError(stop)


def _name_of(thing: Any) -> str:
    """Return MODULE:CLASS of an object, for records and messages."""
    return f"{type(thing).__module__}:{type(thing).__qualname__}"


def _changed(given: Mapping[str, Any], settings: Sequence[str]) -> str:
    """Return the settings that differ from their defaults, as in a call."""
    usual = fit.__kwdefaults__ or {}
    return ", ".join(f"{setting}=" for setting in settings if given[setting] != usual[setting])


def _check_unused(given: Mapping[str, Any], name: str, value: Any, settings: Sequence[str]) -> None:
    """Reject settings that a custom optimizer or scheduler would silently override."""
    if value is not None and (void := _changed(given, settings)):
        raise ConfigError(
            f"{void} has no effect with {name}={type(value).__name__}, which sets this itself; leave out one of the two"
        )


def _check_needs(given: Mapping[str, Any], has_them: bool, what: str, settings: Sequence[str]) -> None:
    """Reject settings that need another kind of data set."""
    if not has_them and (void := _changed(given, settings)):
        raise ConfigError(f"{void} needs {what}, which {type(given['train_set']).__name__} does not have; leave it out")


def configure(**settings: Any) -> TrainConfig:
    """Build a configuration from flat settings; each goes to the group with a field of its name."""
    own = {field.name for field in dataclasses.fields(TrainConfig)} - _GROUPS.keys()
    home = {field.name: group for group, kind in _GROUPS.items() for field in dataclasses.fields(kind)}
    grouped: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    top: dict[str, Any] = {}
    for name, value in settings.items():
        target = top if name in own else grouped[home[name]]
        target[name] = _as_field(name, value)
    return TrainConfig(**top, **{group: kind(**grouped[group]) for group, kind in _GROUPS.items()})


def _as_field(name: str, value: Any) -> Any:
    """Convert a setting to the type of its field."""
    if value is None:
        return None
    if name in ("run_dir", "data_dir"):
        return Path(value)
    if name in ("track", "lr_milestones", "freeze"):
        return (value,) if isinstance(value, str) else tuple(value)
    return str(value) if name == "resume" else value
