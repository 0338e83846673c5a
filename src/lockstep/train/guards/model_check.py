"""Check with blank images, before the run starts, that a model fits its data and the batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.config.schema import TrainConfig
from lockstep.data.augment.transforms import resize
from lockstep.data.sets import ImageData
from lockstep.errors import ConfigError
from lockstep.models.trial_forward import UnfitImageError, send_blank
from lockstep.train.optim.batch_plan import build_sharding, plan_batches
from lockstep.train.optim.build import freeze


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
        outputs = send_blank(model, torch.zeros(1, *shape, device="cpu"))
    except UnfitImageError as error:
        raise ConfigError(f"{name} cannot take images of shape {list(shape)}: {error}{hint}") from None
    if got := _unlike_logits(outputs, 1, classes):
        raise ConfigError(
            f"{name} returned {got} for one image, but the data has {classes} classes: return logits [N, {classes}]"
        )


def _unlike_logits(outputs: object, images: int, classes: int) -> str:
    """Describe outputs that are not logits of the images; "" if they are."""
    if not isinstance(outputs, torch.Tensor):
        return f"a {type(outputs).__name__}"
    is_right = outputs.ndim == 2 and outputs.shape[0] == images and outputs.shape[1] >= classes
    return "" if is_right else f"a tensor of shape {list(outputs.shape)}"


def _is_lazy(model: nn.Module) -> bool:
    return any(is_lazy(parameter) for parameter in model.parameters())


def check_training(config: TrainConfig, model: nn.Module, data: ImageData, workers: int) -> None:
    """Check in training mode that a custom model returns logits, and that any takes the smallest forward pass.

    Batch norm needs two values per channel, so one image may be too few for it.

    Raises:
        ConfigError: The model returns something else, such as auxiliary outputs; or it takes two images, but a worker's
            forward pass has one, which the model does not take.
    """
    step = _step_of_one(config, data, workers)
    if _is_lazy(model) or (step is None and not config.model.is_custom):
        return
    frozen, classes = freeze(model, config.model.freeze), len(data.classes)
    blank = torch.zeros(2, data.input.channels, data.input.height, data.input.width, dtype=torch.uint8, device="cpu")
    blank = resize(blank, min(config.data.sizes_by_epoch.values(), default=None))
    try:
        outputs = send_blank(model, blank, training=True, frozen=frozen)
    except UnfitImageError:
        return  # it may need more images
    if got := _unlike_logits(outputs, 2, classes):
        raise ConfigError(
            f"{config.model.arch} returned {got} for two images in training mode; return logits [N, {classes}] there, "
            f"too, without auxiliary outputs"
        )
    if step is None:
        return
    try:
        send_blank(model, blank[:1], training=True, frozen=frozen)
    except UnfitImageError as error:
        where, fix = ("the last step of an epoch", "add --drop-last, or ") if step else ("a step", "")
        batching = plan_batches(config, workers)
        raise ConfigError(
            f"{config.model.arch} cannot train on one image ({error}), but {where} leaves a worker one: "
            f"{len(data.train):,} images in global batches of {batching.global_batch} = {batching.reason}; {fix}change "
            f"--batch-size or the number of workers"
        ) from None


def _step_of_one(config: TrainConfig, data: ImageData, workers: int) -> int | None:
    """Return the step of an epoch in which a worker's forward pass has one image, or None."""
    if config.parallel.sync_bn and workers > 1:
        return None  # batch norm over all workers takes any number of images
    batching = plan_batches(config, workers)
    sharding = build_sharding(config, data, batching, 0, workers)
    steps = min(sharding.steps_per_epoch, config.max_steps or sharding.steps_per_epoch)
    return next((step for step in (0, steps - 1) if sharding.smallest_pass(step, batching.accumulate) == 1), None)
