"""A backward pass over the bare parameters: all gradients arrive, all zero, with next to nothing computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """Let the module, called without arguments, return a scalar (float32, 0) of all its trained parameters.

    Its gradients arrive in reverse order of the parameters' definition, in one pass of the module's own hooks and
    those of whoever wraps it.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # The engine runs the youngest branch first, and so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    module.forward = touch_parameters
    try:
        yield
    finally:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward
