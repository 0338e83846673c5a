"""A moving average of the weights, evaluated instead of the weights. The base class keeps none."""

from __future__ import annotations

from itertools import chain, compress

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.models.buffers import load_state, unexpanded

Tensors = list[torch.Tensor]


class NoAverage:
    """Evaluates the weights themselves."""

    def __init__(self, model: nn.Module):
        self.model = model

    def begin(self) -> None:
        """Initialize the average with the current weights, after they were loaded."""

    def update(self, unless: torch.Tensor | None = None) -> None:
        """Add the weights of a step to the average.

        Args:
            unless: A float32 scalar on the weights' device. If it is 1, only the count changes: then call `take_back`.
        """

    def take_back(self) -> None:
        """Correct the count after the last update had no effect because of `unless`."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass


class MovingAverage(NoAverage):
    """Exponential moving average in torch's AveragedModel; `model` is the averaged copy.

    torch's update is not used, because it copies the count to the device in each step, which synchronizes.
    """

    def __init__(self, weights: nn.Module, decay: float):
        self._source = weights
        self._decay = decay
        self._averaged = AveragedModel(weights, use_buffers=True)
        self._averaged.n_averaged = self._averaged.n_averaged.cpu()  # a script may have set a default device
        super().__init__(self._averaged.module)

    def begin(self) -> None:
        load_state(self.model, self._source.state_dict())

    @torch.no_grad()
    def update(self, unless: torch.Tensor | None = None) -> None:
        averages, values = _tensors(self.model), _tensors(self._source)
        # Not float8, in which torch does not calculate.
        floating = [
            average.is_complex() or (average.is_floating_point() and average.itemsize > 1) for average in averages
        ]
        counts = [not each for each in floating]
        if any(floating):
            weight = 1.0 if self._averaged.n_averaged == 0 else 1 - self._decay  # the count is on the CPU
            _approach(list(compress(averages, floating)), list(compress(values, floating)), weight, unless)
        if any(counts):
            torch._foreach_copy_(list(compress(averages, counts)), list(compress(values, counts)))
        self._averaged.n_averaged += 1

    def take_back(self) -> None:
        self._averaged.n_averaged -= 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._averaged.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_state(self._averaged, state)


def _approach(averages: Tensors, values: Tensors, weight: float, unless: torch.Tensor | None) -> None:
    """Interpolate averages towards values by `weight`, unless the flag on the device is 1."""
    if unless is None:
        torch._foreach_lerp_(averages, values, weight)
        return
    ways = torch._foreach_sub(values, averages)
    torch._foreach_mul_(ways, weight * (1 - unless))
    torch._foreach_add_(averages, ways)


def _tensors(module: nn.Module) -> Tensors:
    return [unexpanded(tensor) for tensor in chain(module.parameters(), module.buffers())]


def build_average(model: nn.Module, weights: nn.Module, decay: float) -> NoAverage:
    """Return the moving average of `weights`; with `decay` 0 the model itself is evaluated."""
    return MovingAverage(weights, decay) if decay else NoAverage(model)
