"""Evaluation: every sample once, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.data.batch import Batch
from lockstep.train.metrics import Meter, Totals
from lockstep.train.precision import Precision


def evaluate(model: nn.Module, batches: Iterable[Batch], precision: Precision, meter: Meter) -> Totals:
    """Cross-entropy and right answers of a model over all workers' batches, the same totals on each worker."""
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            with precision.autocast():
                logits = model(batch.images)
            losses = F.cross_entropy(logits.to(precision.loss_dtype), batch.labels, reduction="none")
            meter.add(losses, logits, batch.labels, batch.weights)
    return meter.reduce_passes()
