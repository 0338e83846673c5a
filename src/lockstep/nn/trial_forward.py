"""Check with a blank image, before training starts, that a model accepts images of a given size."""

from __future__ import annotations

import traceback
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.errors import first_line

# Exceptions that layers raise for unsupported image sizes.
UNFIT = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)
LIBRARIES = ("lockstep", "torch", "torchvision", "timm")


class UnfitImageError(Exception):
    """A model does not accept an image. The message is the first line of its error, with the location in user code."""


def send_blank(model: nn.Module, image: torch.Tensor) -> Any:
    """Return a model's output in evaluation mode for an image [1, C, H, W], moved to the model's device and dtype.

    Raises:
        UnfitImageError: The model does not accept the image.
    """
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    like = next(tensors, torch.zeros(()))
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            return model(image.to(like.device, like.dtype))
    except UNFIT as error:
        raise UnfitImageError(first_line(error) + _place_in_user_code(error)) from None
    finally:
        for module in training:
            module.training = True


def _place_in_user_code(error: Exception) -> str:
    """Return the innermost frame outside of LIBRARIES as " (file:line)", or "" if there is none."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES
    ]
    return " ({}:{})".format(*frames[-1]) if frames else ""
