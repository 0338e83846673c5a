"""Check with one blank image, before the run starts, that a model fits its data."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.data.sets import ImageData
from lockstep.errors import ConfigError
from lockstep.nn.trial_forward import UnfitImageError, send_blank


def check_model(name: str, model: nn.Module, data: ImageData, hint: str = "") -> None:
    """Check that a model takes the data's images and returns a logit for each class.

    Args:
        name: How the user chose the model, such as "model=" or "--arch resnet18".
        hint: Suggested fix if the model does not accept the images.

    Raises:
        ConfigError: The model does not fit the data.
    """
    if any(is_lazy(parameter) for parameter in model.parameters()):
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
