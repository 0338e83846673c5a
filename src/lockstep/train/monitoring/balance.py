"""Balances unequal workers: shares of the global batch with which all workers finish a step at the same time.

A worker's own time in a step is modeled as fixed + scaling * samples, with the seconds that it measured in its last
steps. The shares change no result beyond rounding: the samples of a step, their order, augmentation and weights stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data.sharding import Sharding
from lockstep.diagnosis.observed_steps import PHASES
from lockstep.diagnosis.phases import Phase
from lockstep.errors import ConfigError
from lockstep.world import accelerator, observer
from lockstep.world.observer import Observer
from lockstep.world.world import World

MIN_SECONDS = 1.0  # of a worker's own work, before shares change; less is noise
MIN_GAIN = 0.03  # share of a step's time that new shares must save
LARGE_GAIN = 0.15  # below it, shares move half the way: a worker that waits less is often a little slower
LARGEST = 2.0  # times an equal share: a worker's memory must hold it
SAID = 0.1  # change of a share, in equal shares, that is worth a line
SCALING: tuple[Phase, ...] = ("data_wait", "forward", "backward", "metrics")  # their time grows with the samples
FIXED: tuple[Phase, ...] = ("callbacks", "optimizer")
HALVINGS = 100


class OwnSeconds(NamedTuple):
    """A worker's own time in some steps: in phases whose time grows with its samples, and in others."""

    scaling: float
    fixed: float


class CutLoader(Protocol):
    """A loader whose later steps can be cut anew."""

    @property
    def sharding(self) -> Sharding | None: ...
    @property
    def next_step(self) -> int: ...
    def recut(self, fractions: tuple[float, ...], first_step: int) -> None: ...


class Balance:
    """Cuts the steps of a loader by the workers' speeds. Collective, like `update`."""

    def __init__(self, world: World, loader: CutLoader):
        assert loader.sharding is not None
        self._world, self._loader = world, loader
        self._samples, self._smallest = loader.sharding.global_batch, loader.sharding.smallest_fraction
        self.fractions = self._said = (1 / world.size,) * world.size
        self._since = 1  # the last step with other shares; the first one also includes the start of much
        self._forget()

    def _forget(self) -> None:
        self._seconds = [OwnSeconds(0.0, 0.0)] * self._world.size

    def update(self, seconds: Sequence[OwnSeconds], steps: int, step: int, step_in_epoch: int) -> bool:
        """Add the workers' own time in the `steps` steps up to `step`; return whether `fractions` changed.

        Args:
            step_in_epoch: The steps of the current epoch up to `step`.
        """
        if step - steps < self._since:
            return False
        pairs = zip(self._seconds, seconds, strict=True)
        self._seconds = [OwnSeconds(own.scaling + more.scaling, own.fixed + more.fixed) for own, more in pairs]
        if max(map(sum, self._seconds)) < MIN_SECONDS:
            return False
        found = better_fractions(self._seconds, self.fractions, self._smallest)
        self._forget()
        if found is None:
            return False
        self.fractions = found
        first = max(self._world.gather(self._loader.next_step))
        self._loader.recut(found, first)
        self._since = step + first - step_in_epoch
        return True

    def record(self) -> dict[str, Any]:
        """Return the fields of a `balance` record."""
        return {"fractions": [round(part, 4) for part in self.fractions]}

    def news(self) -> list[str]:
        """Return a line on the shares, if they changed much since the last line."""
        changes = (abs(now - said) for now, said in zip(self.fractions, self._said, strict=True))
        if max(changes) * len(self.fractions) < SAID:
            return []
        self._said = self.fractions
        counts = ", ".join(f"{part * self._samples:.0f}" for part in self.fractions)
        return [f"balance: of the {self._samples:,} samples of a step, the workers (by rank) now take {counts}"]


def better_fractions(
    seconds: Sequence[OwnSeconds], fractions: Sequence[float], smallest: float
) -> tuple[float, ...] | None:
    """Return the fractions of a step that balance the workers; None if that gains little, or one was not measured.

    Args:
        seconds: The workers' own time with `fractions`.
    """
    fixed = [own.fixed for own in seconds]
    slopes = [own.scaling / part for own, part in zip(seconds, fractions, strict=True)]
    if min(slopes) <= 0:
        return None
    found = balanced(slopes, fixed, smallest)
    expected = max(own + slope * part for own, slope, part in zip(fixed, slopes, found, strict=True))
    gain = 1 - expected / max(map(sum, seconds))
    if gain < MIN_GAIN:
        return None
    if gain >= LARGE_GAIN:
        return found
    return tuple((before + after) / 2 for before, after in zip(fractions, found, strict=True))


def balanced(slopes: Sequence[float], fixed: Sequence[float], smallest: float) -> tuple[float, ...]:
    """Return the fractions of a step that minimize the slowest worker's time, fixed + slope * fraction."""
    largest = min(1.0, LARGEST / len(slopes))

    def fractions_in(seconds: float) -> list[float]:
        parts = ((seconds - own) / slope for own, slope in zip(fixed, slopes, strict=True))
        return [min(largest, max(smallest, part)) for part in parts]

    low, high = 0.0, max(own + slope for own, slope in zip(fixed, slopes, strict=True))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(fractions_in(middle)) < 1 else (low, middle)
    found = fractions_in(high)
    total = sum(found)
    return tuple(part / total for part in found)


def check_measurable(models: Iterable[nn.Module], device: torch.device, flag: str) -> None:
    """Check that the workers' own time can be measured.

    Raises:
        ConfigError: On this device, layers wait for the other workers in the forward pass.
    """
    if not accelerator.overlaps(device):
        return
    for model in models:
        synchronized = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if synchronized or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            what = "synchronized batch norm" if synchronized else "sharded parameters (FSDP2)"
            raise ConfigError(
                f"{flag}: with {what} on an accelerator, workers wait for each other within the passes, so their own "
                f"speeds cannot be measured; leave out {flag}"
            )


class ObservedTimes:
    """This worker's own time in the steps of any program, as the observer measures it."""

    def __init__(self) -> None:
        if observer.current is None:
            observer.observe(Observer())
        assert observer.current is not None
        self._observer = observer.current
        self._before = self._observer.published

    def take(self) -> OwnSeconds:
        """Return the mean own time of a step since the last call; 0 if none was measured."""
        self._observer.guard(self._observer.publish)()
        now, before = self._observer.published, self._before
        self._before = now
        steps = max(1, now.timed_steps - before.timed_steps)
        rows = zip(PHASES, now.phase_seconds, before.phase_seconds, strict=True)
        seconds = {phase: (after - earlier) / steps for phase, after, earlier in rows}
        return OwnSeconds(sum(seconds[phase] for phase in SCALING if phase in seconds), seconds["optimizer"])
