"""A backward pass over the parameters alone, which produces all gradients (zeros) at almost no cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def bare_forward(module: nn.Module) -> Iterator[None]:
    """Make the module, called without arguments, return a scalar (float32, 0) that depends on all trained parameters.

    Gradients arrive in reverse order of definition, in one pass that runs the hooks of the module and its wrappers.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def touch_parameters() -> torch.Tensor:
        # Autograd runs the newest branch first, so the last parameter's gradient arrives first.
        return torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()

    own_forward = vars(module).get("forward")
    module.forward = touch_parameters
    try:
        yield
    finally:
        del module.forward
        if own_forward is not None:
            module.forward = own_forward
