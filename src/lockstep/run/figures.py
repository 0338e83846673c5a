"""Weighted means of what a loop's steps report, over all workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from lockstep.run.position import Pairs
from lockstep.world.world import World


class Figures:
    """Weighted means over the steps since the last report, on the workers' devices until then."""

    def __init__(self, earlier: Mapping[str, Pairs]):
        """`earlier`: figures of an interrupted session, of all workers; on one of them."""
        self._values: dict[str, list[torch.Tensor]] = {}
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._earlier = dict(earlier)

    def add(self, figures: Mapping[str, float | torch.Tensor], weight: float | torch.Tensor) -> None:
        for name, value in figures.items():
            self._values.setdefault(name, []).append(torch.as_tensor(value).detach().reshape(()))
            self._weights.setdefault(name, []).append(torch.as_tensor(weight).detach().reshape(()))

    def own(self) -> dict[str, Pairs]:
        """Return each figure's numbers and weights in this worker's steps; waits for the device."""
        own = {name: list(pairs) for name, pairs in self._earlier.items()}
        for name, values in self._values.items():
            pairs = zip(_numbers(values), _numbers(self._weights[name]), strict=True)
            own.setdefault(name, []).extend((number, weight) for number, weight in pairs if weight)
        return {name: tuple(pairs) for name, pairs in own.items()}

    def gather(self, world: World) -> dict[str, Pairs]:
        """Return each figure's numbers and weights in the steps of all workers. Collective; waits for the device."""
        workers = world.gather(self.own())
        names = {name: None for worker in workers for name in worker}  # in order
        return {name: tuple(pair for worker in workers for pair in worker.get(name, ())) for name in names}

    def take(self, world: World) -> dict[str, float]:
        """Return the mean of each figure over all workers, and forget them. Collective; waits for the device."""
        found = self.gather(world)
        self.__init__({})  # type: ignore[misc]
        # fsum, so that the mean does not depend on the order, and so not on interruptions.
        return {
            name: math.fsum(number * weight for number, weight in pairs) / math.fsum(weight for _, weight in pairs)
            for name, pairs in found.items()
            if pairs
        }


def _numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of scalars, usually after one wait for their device."""
    if len({scalar.device for scalar in scalars}) > 1:
        scalars = [scalar.cpu() for scalar in scalars]
    numbers: list[float] = torch.stack(list(scalars)).cpu().double().tolist()
    return numbers
