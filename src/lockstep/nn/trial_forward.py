"""One blank image through a model, to learn whether it takes such images before any work is done."""

from __future__ import annotations

import traceback
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.errors import first_line

# What networks raise at images of a size that they do not take: each layer has an error of its own.
UNFIT = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)


LIBRARIES = ("lockstep", "torch", "torchvision", "timm")


class UnfitImageError(Exception):
    """A model does not take an image; the text is the first line of its own error and where in the user's code."""


def send_blank(model: nn.Module, image: torch.Tensor) -> Any:
    """What a model in evaluation says to an image [1, C, H, W], which takes the device and dtype of its weights.

    Raises:
        UnfitImageError: It does not take the image.
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
    """The innermost line of the traceback that is in no library of networks, or nothing."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES
    ]
    return " ({}:{})".format(*frames[-1]) if frames else ""
