"""Check with blank images, before the run starts, that a model fits its data and the batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.config.schema import TrainConfig
from lockstep.data.augment.progressive import resize
from lockstep.data.sets import ImageData
from lockstep.errors import ConfigError
from lockstep.nn.trial_forward import UnfitImageError, send_blank
from lockstep.train.optim.batch_plan import build_sharding, plan_batches
from lockstep.train.optim.freezing import freeze


def check_model(name: str, model: nn.Module, data: ImageData, hint: str = "") -> None:
    """Check that a model takes the data's images and returns a logit for each class.

    Args:
        name: How the user chose the model, such as "model=" or "--arch resnet18".
        hint: Suggested fix if the model does not accept the images.

    Raises:
        ConfigError: The model does not fit the data.
    """
    if _is_lazy(model):
        return  # check_same_job rejects lazy parameters
    shape, classes = (data.input.channels, data.input.height, data.input.width), len(data.classes)
    try:
        outputs = send_blank(model, torch.zeros(1, *shape))
    except UnfitImageError as error:
        raise ConfigError(f"{name} cannot take images of shape {list(shape)}: {error}{hint}") from None
    if not isinstance(outputs, torch.Tensor):
        got = f"a {type(outputs).__name__}"
    elif outputs.ndim != 2 or outputs.shape[1] < classes:
        got = f"a tensor of shape {list(outputs.shape)}"
    else:
        return
    raise ConfigError(
        f"{name} returned {got} for one image, but the data has {classes} classes: return logits [N, {classes}]"
    )


def _is_lazy(model: nn.Module) -> bool:
    return any(is_lazy(parameter) for parameter in model.parameters())


def check_training(config: TrainConfig, model: nn.Module, data: ImageData, workers: int) -> None:
    """Check in training mode that a model takes the smallest forward pass of an epoch.

    Batch norm needs two values per channel, so one image may be too few for it.

    Raises:
        ConfigError: The model takes two images, but a worker's forward pass has one, which the model does not take.
    """
    batching = plan_batches(config, workers)
    sharding = build_sharding(config, data, batching, 0, workers)
    steps = min(sharding.steps_per_epoch, config.max_steps or sharding.steps_per_epoch)
    smallest, step = min((sharding.smallest_pass(step, batching.accumulate), step) for step in (0, steps - 1))
    is_global = config.parallel.sync_bn and workers > 1  # batch norm over all workers takes any number of images
    if smallest > 1 or is_global or _is_lazy(model):
        return
    frozen = freeze(model, config.model.freeze)
    blank = torch.zeros(2, data.input.channels, data.input.height, data.input.width, dtype=torch.uint8)
    blank = resize(blank, min(config.data.sizes_by_epoch.values(), default=None))
    try:
        send_blank(model, blank, training=True, frozen=frozen)
    except UnfitImageError:
        return  # for another reason
    try:
        send_blank(model, blank[:1], training=True, frozen=frozen)
    except UnfitImageError as error:
        where, fix = ("the last step of an epoch", "add --drop-last, or ") if step else ("a step", "")
        raise ConfigError(
            f"{config.model.arch} cannot train on one image ({error}), but {where} leaves a worker one: "
            f"{len(data.train):,} images in global batches of {batching.global_batch} = {batching.reason}; {fix}change "
            f"--batch-size or the number of workers"
        ) from None
