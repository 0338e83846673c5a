"""A trial with blank images leaves the model as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models.trial_forward import UnfitImageError, send_blank


class Counting(nn.Module):
    """Changes its buffers in training: one in place, one by another tensor, one that did not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.full((3,), torch.nan), persistent=False)
        self.register_buffer("last", None)
        self.register_buffer("ones", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean = self.mean + x.mean((0, 2, 3))
            self.last = x
        return self.norm(x) if self.norm.training else self.norm(x).mean((2, 3))


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: copy.deepcopy(module._buffers) for name, module in model.named_modules()}


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_buffers_stay_as_they_are(training: bool) -> None:
    model = Counting()
    model.norm.eval()
    before, own = _state(model), dict(model.named_buffers())
    for images in (torch.ones(2, 3, 4, 4), torch.ones(2, 5, 4, 4)):
        if images.shape[1] == 3:
            send_blank(model, images, training)
        else:
            with pytest.raises(UnfitImageError):
                send_blank(model, images, training)
        torch.testing.assert_close(_state(model), before, rtol=0, atol=0, equal_nan=True)
        assert all(buffer is own[name] for name, buffer in model.named_buffers())
        assert [module.training for module in model.modules()] == [True, False]


def test_frozen_modules_are_tried_in_evaluation_mode() -> None:
    model = Counting()
    assert send_blank(model, torch.ones(2, 3, 4, 4), training=True).ndim == 4
    assert send_blank(model, torch.ones(2, 3, 4, 4), training=True, frozen=[model.norm]).ndim == 2
