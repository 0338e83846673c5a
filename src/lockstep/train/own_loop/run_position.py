"""Where a run of a user's own loop is, as checkpoints store it, with the figures that are not in a record yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep.train.live_state import Live, StepBoundary
from lockstep.train.progress import Position
from lockstep.world.world import World

Pairs = tuple[tuple[float, ...], ...]  # numbers, each with its weight


@dataclass
class LoopPosition(Position):
    """Where a loop is: epochs done, and steps done of the current epoch.

    `has_recorded`: whether `TrainingRun.record` was called since the last step; a resumed run does not repeat it.
    `figures`: those of the steps since the last report, when a checkpoint was written.
    """

    epoch: int = 0
    step_in_epoch: int = 0
    has_recorded: bool = False
    figures: dict[str, Pairs] = field(default_factory=dict)

    @property
    def is_before_evaluation(self) -> bool:
        return self.step_in_epoch > 0 and not self.has_recorded

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        position = super().from_mapping(values)
        if not all(0 < weight < math.inf for pairs in position.figures.values() for _, weight in pairs):
            raise ValueError("invalid figures")
        return position


# The kinds of states whose changes within a step are noticed.
FOLLOWED = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


class LoopBoundary:
    """The end of the last complete step of a loop, as far as the next one has changed it.

    Args:
        extra: `TrainingRun.extra`.
        is_live: Whether `restore` will be asked for, if a worker is lost.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        models: Sequence[nn.Module],
        extra: dict[str, Any],
        position: LoopPosition,
        is_live: bool,
    ):
        self.step = -1
        self._is_live = is_live and all(isinstance(each, FOLLOWED) for each in state.values())
        self._models = [StepBoundary(model, position, False, self._is_live) for model in models]
        self._parameters = [parameter for model in models for parameter in model.parameters()]
        self._states = state.values()
        self._extra = extra
        self._small: list[Any] = []

    def begin(self, step: int) -> None:
        """Begin a step after this one."""
        self.step = step
        if self._is_live:
            self._small = self._read_small()
            for model in self._models:
                model.begin()

    def restore(self) -> bool:
        """Go back to the end of the step, if possible; not if the next one has changed what is not followed."""
        return all(model.restore() for model in self._models) and self._is_live and self._small == self._read_small()

    def _read_small(self) -> list[Any]:
        """Return what a step may change besides buffers, or something that shows a change."""
        found: list[Any] = [self._fingerprint(self._extra), [each._version for each in self._parameters]]
        for each in self._states:
            if isinstance(each, torch.optim.Optimizer):
                groups = [
                    {key: value for key, value in group.items() if key != "params"} for group in each.param_groups
                ]
                found.append(self._fingerprint(groups))
            elif not isinstance(each, nn.Module):
                found.append(self._fingerprint(each.state_dict()))
        return found

    def _fingerprint(self, value: Any) -> Any:
        """Return something that differs after a change of a value: JSON or tensors."""
        if isinstance(value, torch.Tensor):  # which stays alive, so that no other gets its id
            return id(value), None if value.is_inference() else value._version, value
        if isinstance(value, Mapping):
            return {key: self._fingerprint(each) for key, each in value.items()}
        return [self._fingerprint(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class LiveRun(Live):
    """The state of a run after a step, and this worker's figures since the last record."""

    figures: dict[str, Pairs]


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
