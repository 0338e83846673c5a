"""A moving average of the weights, evaluated in place of the weights themselves. The base keeps none."""

from __future__ import annotations

from itertools import chain, compress

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


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
    """Exponential moving average in torch's AveragedModel; `model` is the averaged copy.

    The update is not torch's, which copies its count of updates to the device in each step and so waits for it.
    """

    def __init__(self, weights: nn.Module, decay: float):
        self._source = weights
        self._decay = decay
        self._averaged = AveragedModel(weights, use_buffers=True)
        super().__init__(self._averaged.module)

    def begin(self) -> None:
        self.model.load_state_dict(self._source.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        averages, values = _tensors(self.model), _tensors(self._source)
        if self._averaged.n_averaged == 0:  # it is on the CPU
            torch._foreach_copy_(averages, values)
        else:
            floating = [average.is_floating_point() or average.is_complex() for average in averages]
            counts = [not each for each in floating]
            if any(floating):
                torch._foreach_lerp_(
                    list(compress(averages, floating)), list(compress(values, floating)), 1 - self._decay
                )
            if any(counts):
                torch._foreach_copy_(list(compress(averages, counts)), list(compress(values, counts)))
        self._averaged.n_averaged += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._averaged.load_state_dict(state)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return list(chain(module.parameters(), module.buffers()))


def build_average(model: nn.Module, weights: nn.Module, decay: float) -> NoAverage:
    """The average of `weights` that `decay` asks for; 0 keeps none, and the model itself is evaluated."""
    return MovingAverage(weights, decay) if decay else NoAverage(model)
