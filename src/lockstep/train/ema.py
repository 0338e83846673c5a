"""A moving average of the weights, evaluated in place of the weights themselves. The base keeps none."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class NoAverage:
    """Evaluates the weights as they are."""

    def __init__(self, model: nn.Module):
        self.model = model

    def begin(self) -> None:
        """Begin the average with the weights as they are, which come from elsewhere."""

    def update(self) -> None:
        """Take the step's weights into the average."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass


class MovingAverage(NoAverage):
    """Exponential moving average with torch's AveragedModel; `model` is the averaged copy."""

    def __init__(self, weights: nn.Module, decay: float):
        self._source = weights
        self._averaged = AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        super().__init__(self._averaged.module)

    def begin(self) -> None:
        self.model.load_state_dict(self._source.state_dict())

    def update(self) -> None:
        self._averaged.update_parameters(self._source)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._averaged.load_state_dict(state)


def build_average(model: nn.Module, weights: nn.Module, decay: float) -> NoAverage:
    """The average of `weights` that `decay` asks for; 0 keeps none, and the model itself is evaluated."""
    return MovingAverage(weights, decay) if decay else NoAverage(model)
