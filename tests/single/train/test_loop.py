"""The pieces of a training step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lockstep.data.batch import Batch
from lockstep.train.loop import _split
from lockstep.train.losses import losses_of


def _mixed(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels, others = (torch.randint(0, 5, (count,), generator=generator) for _ in range(2))
    shares = 0.5 + 0.5 * torch.rand(count, generator=generator)
    return Batch(torch.randn(count, 3, 2, 2, generator=generator), labels, torch.ones(count), others, shares)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_mixed_image_is_both_labels_losses_by_their_shares(smoothing: float) -> None:
    batch, logits = _mixed(6), torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    criterion = partial(F.cross_entropy, reduction="none", label_smoothing=smoothing)
    losses = losses_of(criterion, logits, batch)
    assert batch.others is not None
    assert batch.shares is not None
    for row in range(6):
        target = torch.full((5,), smoothing / 5)
        target[batch.labels[row]] += (1 - smoothing) * batch.shares[row]
        target[batch.others[row]] += (1 - smoothing) * (1 - batch.shares[row])
        assert float(losses[row]) == pytest.approx(float(-(target * logits[row].log_softmax(0)).sum()), rel=1e-5)
    plain = batch._replace(others=None, shares=None)
    assert torch.equal(losses_of(criterion, logits, plain), criterion(logits, batch.labels))


@pytest.mark.parametrize(("count", "passes", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (4, 1, [4])])
def test_a_batch_is_split_with_all_that_belongs_to_its_samples(count: int, passes: int, sizes: list[int]) -> None:
    batch = _mixed(count)
    parts = _split(batch, passes)
    assert [len(part.labels) for part in parts] == sizes
    for whole, pieces in zip(batch, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat([piece for piece in pieces if piece is not None]), whole)
    plain = _split(Batch(batch.images, batch.labels), passes)
    assert all(part.weights is part.others is part.shares is None for part in plain)
