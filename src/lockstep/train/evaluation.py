"""Evaluation: each sample counts exactly once for any number of workers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lockstep.data.pipeline.lost_loaders import lost_loaders_named
from lockstep.data.sets import Batch
from lockstep.diagnosis import publisher
from lockstep.train.losses import Criterion, cross_entropy
from lockstep.train.metrics import Measures, Meter, Totals
from lockstep.train.precision import Precision


@lost_loaders_named()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision,
    meter: Meter,
    criterion: Criterion = cross_entropy,
    measures: Measures | None = None,
) -> Totals:
    """Return the totals of a model over the batches of all workers, equal on each worker.

    Args:
        measures: Accumulates further metrics.
    """
    measures = measures or Measures()
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            publisher.report("evaluation")
            with precision.autocast():
                logits = model(batch.images)
            outputs = logits.to(precision.loss_dtype)
            meter.add(criterion(outputs, batch.labels), outputs, batch.labels, batch.weights)
            measures.add(outputs, batch.labels)
    return meter.reduce_passes()
