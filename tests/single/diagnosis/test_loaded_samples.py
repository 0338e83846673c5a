"""Which passes of a loader trained."""

from __future__ import annotations

import pytest
import torch

from lockstep.diagnosis.loaded_samples import LoadedSamples


class Iterator:
    """A loader's iterator."""


@pytest.mark.parametrize(
    ("has_gradients", "has_backward", "has_trained"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_passes_with_a_backward_pass_trained(has_gradients: bool, has_backward: bool, has_trained: bool) -> None:
    samples, iterator = LoadedSamples(), Iterator()
    for _ in range(2):
        samples.deliver(iterator, torch.ones(4), has_gradients)
        if has_backward:
            samples.train()
        assert samples.end(iterator) == has_trained
    assert samples.samples == 8 * has_trained
