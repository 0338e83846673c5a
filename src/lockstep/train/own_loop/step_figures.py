"""Means of the figures that a user's own loop gives with each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from lockstep.world.world import World


class Figures:
    """Weighted means over the steps since the last report, on the workers' devices until then."""

    def __init__(self) -> None:
        self._values: dict[str, list[torch.Tensor]] = {}
        self._weights: dict[str, list[torch.Tensor]] = {}

    def add(self, figures: Mapping[str, float | torch.Tensor], weight: float | torch.Tensor) -> None:
        for name, value in figures.items():
            self._values.setdefault(name, []).append(torch.as_tensor(value).detach().reshape(()))
            self._weights.setdefault(name, []).append(torch.as_tensor(weight).detach().reshape(()))

    def take(self, world: World) -> dict[str, float]:
        """Return the mean of each figure over all workers. Collective; waits for the device."""
        own = {}
        for name, values in self._values.items():
            numbers, weights = _numbers(values), _numbers(self._weights[name])
            pairs = [pair for pair in zip(numbers, weights, strict=True) if pair[1]]
            own[name] = [math.fsum(number * weight for number, weight in pairs), sum(weight for _, weight in pairs)]
        self.__init__()  # type: ignore[misc]
        sums: dict[str, list[float]] = {}
        for worker in world.gather(own):
            for name, (total, weight) in worker.items():
                before = sums.setdefault(name, [0.0, 0.0])
                sums[name] = [before[0] + total, before[1] + weight]
        return {name: total / weight for name, (total, weight) in sums.items() if weight}


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalars, usually after one wait for their device."""
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    numbers: list[float] = torch.stack(list(scalars)).double().cpu().tolist()
    return numbers
