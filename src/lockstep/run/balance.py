"""Balances unequal workers: shares of the global batch with which all workers finish a step at the same time.

A worker's own time in a step is modeled as fixed + scaling * samples, with the seconds that it measured in its last
steps. The shares change no result beyond rounding: the samples of a step, their order, augmentation and weights stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.data.sharding import Sharding
from lockstep.diagnosis.observed_steps import PHASES
from lockstep.diagnosis.phases import Phase
from lockstep.errors import ConfigError
from lockstep.run.session import Session
from lockstep.world import accelerator, observer
from lockstep.world.observer import Observer
from lockstep.world.world import World

MIN_SECONDS = 1.0  # of a worker's own work, before shares change by a large gain; less is noise
SURE_SECONDS = 4.0  # and by a small gain: the speed of a shared core varies by a tenth from second to second
MIN_GAIN = 0.03  # share of a step's time that new shares must save
LARGE_GAIN = 0.15  # below it, shares move half the way: a worker that waits less is often a little slower
LARGEST = 2.0  # times an equal share: a worker's memory must hold it
SAID = 0.1  # change of a share, in equal shares, that is worth a line
MAX_SHOWN = 16  # workers in a line
UNMEASURED = 5  # comparisons without a measurement of a worker, before a line says so
PREFETCHED = 0.1  # share of a worker's time that it may wait for loader processes
SCALING: tuple[Phase, ...] = ("forward", "backward", "metrics")  # their time grows with the samples
FIXED: tuple[Phase, ...] = ("callbacks", "optimizer")
LOADING: tuple[Phase, ...] = ("data_wait",)
HALVINGS = 100


class OwnSeconds(NamedTuple):
    """A worker's own time in some steps: in phases whose time grows with its samples, in others, and loading data."""

    scaling: float
    fixed: float
    loading: float = 0.0

    def plus(self, other: OwnSeconds) -> OwnSeconds:
        return OwnSeconds(self.scaling + other.scaling, self.fixed + other.fixed, self.loading + other.loading)

    @property
    def total(self) -> float:
        return self.scaling + self.fixed + self.loading


class CutLoader(Protocol):
    """A loader whose later steps can be cut again."""

    @property
    def sharding(self) -> Sharding | None: ...
    @property
    def next_step(self) -> int: ...
    @property
    def prefetches(self) -> bool: ...
    def recut(self, fractions: tuple[float, ...], first_step: int) -> None: ...


class Balance:
    """Cuts the steps of a loader by the workers' speeds. Collective, like `update`."""

    def __init__(self, world: World, loader: CutLoader, step: int):
        """`step`: the steps of earlier sessions."""
        self._world, self._loader = world, loader
        self.counts = self._said = self._sharding.counts()
        self._since = step + 1  # the last step that is not measured: the first one also includes the start of much
        self._unmeasured = 0  # comparisons since all workers were measured
        self._has_warned = False
        self._forget()

    @property
    def _sharding(self) -> Sharding:
        assert self._loader.sharding is not None
        return self._loader.sharding

    def _forget(self) -> None:
        self._seconds = [OwnSeconds(0.0, 0.0)] * self._world.size

    def update(self, seconds: Sequence[OwnSeconds], steps: int, step: int, step_in_epoch: int) -> bool:
        """Add the workers' own time in the last `steps` steps, up to `step`; return whether `counts` changed."""
        if step - steps < self._since:
            return False
        self._seconds = [own.plus(more) for own, more in zip(self._seconds, seconds, strict=True)]
        self._unmeasured = 0 if min(own.scaling for own in self._seconds) > 0 else self._unmeasured + 1
        longest = max(own.total for own in self._seconds)
        if longest < MIN_SECONDS:
            return False
        least_gain = MIN_GAIN if longest >= SURE_SECONDS else LARGE_GAIN
        found = None
        if self._world.is_main:  # one worker decides: Python's versions sum floats differently
            found = better_fractions(self._seconds, self._sharding, self._loader.prefetches, least_gain)
        found = self._world.from_main(found)
        if found is not None or longest >= SURE_SECONDS:
            self._forget()
        if found is None:
            return False
        first = max(self._world.gather(self._loader.next_step))
        self._loader.recut(tuple(found), first)
        self.counts = self._sharding.counts()
        self._since = step + first - step_in_epoch + 1  # the first step with other shapes may compile again
        return True

    def news(self) -> list[str]:
        """Return a line on the shares, if they changed much since the last line, or cannot be measured."""
        if self._unmeasured >= UNMEASURED and not self._has_warned:
            self._has_warned = True
            return ["balance: the shares stay, since a worker's passes cannot be measured; call run.backward(loss)"]
        changes = (abs(now - said) for now, said in zip(self.counts, self._said, strict=True))
        if max(changes) * len(self.counts) < SAID * self._sharding.global_batch:
            return []
        self._said = self.counts
        shown = ", ".join(map(str, self.counts[:MAX_SHOWN])) + ", ..." * (len(self.counts) > MAX_SHOWN)
        return [f"balance: of the {sum(self.counts):,} samples of a step, the workers (by rank) now take {shown}"]


def rebalance(
    session: Session[Any], balance: Balance, seconds: Sequence[OwnSeconds], steps: int, step_in_epoch: int
) -> None:
    """Let the workers' shares of later steps follow their own times in the last `steps` steps. Collective."""
    if balance.update(seconds, steps, session.progress.step, step_in_epoch):
        session.record("balance", samples=balance.counts)
    session.say(balance.news())


def better_fractions(
    seconds: Sequence[OwnSeconds], sharding: Sharding, prefetches: bool, least_gain: float
) -> tuple[float, ...] | None:
    """Return the fractions of a step that balance the workers; None if they would gain little, or cannot be known.

    Args:
        seconds: The workers' own time with the fractions of `sharding`.
        prefetches: Whether loading overlaps with the steps. What is seen of it then depends on how long a worker waits
            for others, and says nothing on its speed.
        least_gain: The share of a step's time that they must save.
    """
    if prefetches and any(own.loading > PREFETCHED * own.total for own in seconds):
        return None
    total = sharding.count(0)
    now = [count / total for count in sharding.counts()]
    fixed = [own.fixed for own in seconds]
    grows = [own.scaling + (0.0 if prefetches else own.loading) for own in seconds]
    if min(own.scaling for own in seconds) <= 0 or min(now) <= 0:
        return None
    slopes = [own / part for own, part in zip(grows, now, strict=True)]
    longest = max(own + more for own, more in zip(fixed, grows, strict=True))

    def gain(fractions: tuple[float, ...]) -> float:
        counts = replace(sharding, fractions=fractions).counts()
        return 1 - max(own + slope * n / total for own, slope, n in zip(fixed, slopes, counts, strict=True)) / longest

    whole = balanced(slopes, fixed, sharding.smallest_fraction)
    half = tuple((before + after) / 2 for before, after in zip(now, whole, strict=True))
    moves = [whole] if gain(whole) >= LARGE_GAIN else [half, whole]
    return next((move for move in moves if gain(move) >= least_gain), None)


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
        self._before = self._observer.counts.published

    def take(self) -> OwnSeconds:
        """Return the mean own time of a step since the last call; 0 if none was measured."""
        self._observer.guard(self._observer.publish)()
        now, before = self._observer.counts.published, self._before
        self._before = now
        steps = max(1, now.timed_steps - before.timed_steps)
        rows = zip(PHASES, now.phase_seconds, before.phase_seconds, strict=True)
        seconds = {phase: (after - earlier) / steps for phase, after, earlier in rows}
        kinds = (sum(seconds.get(phase, 0.0) for phase in kind) for kind in (SCALING, FIXED, LOADING))
        return OwnSeconds(*kinds)
