"""The loss of each sample of a batch, including mixed images; custom losses give these values or their mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.sets import Batch
from lockstep.errors import ConfigError

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
cross_entropy: Criterion = partial(F.cross_entropy, reduction="none")


def losses_of(criterion: Criterion, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the loss of each sample, [N]; for a mixed image, the losses of both labels weighted by their shares."""
    losses = criterion(logits, batch.labels)
    if batch.others is None or batch.shares is None:
        return losses
    return torch.lerp(criterion(logits, batch.others), losses, batch.shares.to(losses.dtype))


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps outputs [N, K] and targets [N] to the loss of each sample, [N], or to their mean, a scalar."""


class CustomLoss:
    """Adapts a loss to the training loop, which needs one value per sample.

    A mean is expanded to all of its samples, so that shares of different sizes are weighted correctly.

    Args:
        per_sample: Reject means, because mixup or cutmix weight the loss of each sample.
    """

    def __init__(self, loss: Loss, device: torch.device, per_sample: bool = False):
        """Raise ConfigError if `loss` is not a valid loss."""
        if not callable(loss):
            raise ConfigError(f"loss={loss!r}: must be a function of (outputs, targets), such as torch.nn.MSELoss()")
        if isinstance(loss, nn.Module):
            if any(parameter.requires_grad for parameter in loss.parameters()):
                raise ConfigError(
                    f"loss={type(loss).__name__} has parameters, which fit() does not train; move them into the model"
                )
            loss = loss.to(device)
        self._loss, self._per_sample = loss, per_sample

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample, [N]."""
        losses: Any = self._loss(outputs, targets)
        samples = len(targets)
        if not isinstance(losses, torch.Tensor):
            raise ConfigError(f"loss= returned a {type(losses).__name__}, not a tensor; {_WANTED}")
        if losses.shape not in ((), (samples,)):
            raise ConfigError(f"loss= returned a tensor of shape {list(losses.shape)} for {samples} samples; {_WANTED}")
        if torch.is_grad_enabled() and outputs.requires_grad and not losses.requires_grad:
            raise ConfigError(
                "loss= returned a tensor without a gradient; compute it from outputs with torch functions"
            )
        if losses.ndim:
            return losses
        if self._per_sample:
            raise ConfigError(
                'loss= returned the mean, but mixup and cutmix need one loss per sample (reduction="none")'
            )
        return losses.expand(samples)


_WANTED = 'return one loss per sample (reduction="none"), or their mean'
