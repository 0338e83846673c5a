"""Check with trial inputs, before training starts, that a model accepts inputs of a given form and number."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import nn

from lockstep.errors import first_line
from lockstep.models.buffers import Buffers
from lockstep.models.nested import cast, map_tensors

# Exceptions that layers raise for unsupported image sizes.
UNFIT = (RuntimeError, ValueError, AssertionError, IndexError, TypeError)
LIBRARIES = ("lockstep", "torch", "torchvision", "timm")


class UnfitImageError(Exception):
    """A model does not accept an input. The message is the first line of its error, with the location in user code."""


def send_blank(model: nn.Module, inputs: Any, training: bool = False, frozen: Collection[nn.Module] = ()) -> Any:
    """Return a model's output for inputs, such as images [N, C, H, W], moved to the model's device and dtype.

    The model's modes and buffers, such as the statistics of batch norm, stay as they are.

    Args:
        training: Use training mode instead of evaluation mode, except for the modules in `frozen`.

    Raises:
        UnfitImageError: The model does not accept the inputs.
    """
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    like = next(tensors, torch.zeros(()))
    with _restored(model), torch.no_grad():
        model.train(training)
        for module in frozen:
            module.eval()
        try:
            return model(cast(map_tensors(lambda tensor: tensor.to(like.device), inputs), like.dtype))
        except UNFIT as error:
            raise UnfitImageError(first_line(error) + user_frame(traceback.walk_tb(error.__traceback__))) from None


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore the modes and buffers of a model's modules after the block."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = Buffers()
    buffers.keep(model)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        buffers.put_back()


def user_frame(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the last of a stack's frames outside of LIBRARIES as " (file:line)", or "" if there is none."""
    own = [
        (frame.f_code.co_filename, line)
        for frame, line in frames
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES
    ]
    return " ({}:{})".format(*own[-1]) if own else ""
