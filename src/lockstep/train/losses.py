"""The loss of each sample of a batch, including mixed images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from lockstep.data.sets import Batch

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
cross_entropy: Criterion = partial(F.cross_entropy, reduction="none")


def losses_of(criterion: Criterion, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the loss of each sample, [N]; for a mixed image, the losses of both labels weighted by their shares."""
    losses = criterion(logits, batch.labels)
    if batch.others is None or batch.shares is None:
        return losses
    return torch.lerp(criterion(logits, batch.others), losses, batch.shares.to(losses.dtype))
