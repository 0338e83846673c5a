"""Callbacks of the training loop, which can also stop it on all workers together, such as EarlyStopping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import CheckpointError, ConfigError
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.run.checkpoints.checkpoint_folder import Checkpoints
from lockstep.train.history import EpochRecords, History
from lockstep.train.progress import Progress
from lockstep.world.world import World


class TrainingState:
    """The run as seen by callbacks; equal on all workers except for `rank` and times in the history."""

    def __init__(
        self,
        world: World,
        weights: nn.Module,
        optimizer: Optimizer,
        progress: Progress,
        epochs: EpochRecords,
        steps_per_epoch: int,
        run_dir: Path,
    ):
        self._world, self._progress, self._epochs = world, progress, epochs
        self.model = weights
        """The model whose weights the optimizer updates."""
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        self.run_dir = run_dir
        self.epoch = max(1, -(-progress.step // steps_per_epoch))
        """The current or last epoch, from 1."""
        self._reason: str | None = None

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def workers(self) -> int:
        return self._world.size

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._progress.step

    @property
    def history(self) -> History:
        """The results of all epochs so far, including those before a resume."""
        return self._epochs.history()

    def stop(self, reason: str = "") -> None:
        """Stop all workers after this step or epoch, with an evaluation, a checkpoint and a result.

        It is sufficient to call this on one worker.
        """
        self._reason = self._reason or reason or "a callback"

    def take_request(self) -> str | None:
        """Return the reason of a `stop` since the last call; None if there was none."""
        reason, self._reason = self._reason, None
        return reason


class Callback(Protocol):
    """Base class of callbacks, called on every worker. Override the methods you need; the defaults do nothing.

    With several workers, overriding `on_step_begin` or `on_step_end` adds a collective on the host after every step, to
    agree on stopping. The cost at the other events is negligible.

    The methods return explicitly, because type checkers would treat them as abstract otherwise.
    """

    def on_epoch_begin(self, run: TrainingState) -> None:
        """Called before an epoch's first step, also after a resume within the epoch."""
        return

    def on_step_begin(self, run: TrainingState) -> None:
        """Called before a step; `run.step` does not include it yet."""
        return

    def on_step_end(self, run: TrainingState) -> None:
        """Called after a step. Its loss is still on the device; see `on_epoch_end` for results."""
        return

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None:
        """Called after an epoch's evaluation, with loss, samples, metrics and, of classes, top1 and top5."""
        return

    def on_checkpoint(self, run: TrainingState, path: Path) -> None:
        """Called when a checkpoint is complete in the folder `path`, on the file system of rank 0."""
        return


FALLING = ("loss",)
"""Results that improve by decreasing; for custom metrics, set `mode`."""


class EarlyStopping(Callback):
    """Stops the run after `patience` consecutive evaluations without improvement.

    Evaluations before a resume count. The run folder's model.safetensors has the weights with the best top1 or, if
    targets are not classes, the lowest loss.

    Args:
        monitor: loss, top1, top5 or the name of a metric, from the evaluations.
        mode: Whether smaller (min) or larger (max) is better; auto: min for loss, max for others.
        min_delta: An improvement must exceed this.
    """

    def __init__(
        self,
        patience: int = 5,
        monitor: str = "loss",
        mode: Literal["auto", "min", "max"] = "auto",
        min_delta: float = 0.0,
    ):
        if patience < 1:
            raise ConfigError(f"EarlyStopping(patience={patience}): must be at least 1")
        if mode not in ("auto", "min", "max"):
            raise ConfigError(f"EarlyStopping(mode={mode!r}): must be 'auto', 'min' or 'max'")
        if not min_delta >= 0:
            raise ConfigError(f"EarlyStopping(min_delta={min_delta}): must be at least 0")
        self._patience, self._monitor, self._min_delta = patience, monitor, min_delta
        self._sign = -1.0 if mode == "min" or (mode == "auto" and monitor in FALLING) else 1.0

    def on_epoch_begin(self, run: TrainingState) -> None:
        self._check(run)  # a resumed run may have met the condition already

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None:
        if self._monitor not in figures:
            known = ", ".join(name for name in figures if name != "samples")
            raise ConfigError(f"EarlyStopping(monitor={self._monitor!r}): unknown metric; choose from {known}")
        if np.ndim(figures[self._monitor]):
            raise ConfigError(f"EarlyStopping(monitor={self._monitor!r}): this metric is not a single number")
        self._check(run)

    def _check(self, run: TrainingState) -> None:
        values = run.history.val.get(self._monitor, np.zeros(0))
        best, since = -np.inf, 0
        for value in self._sign * values:
            best, since = (value, 0) if value > best + self._min_delta else (best, since + 1)
        if since >= self._patience:
            run.stop(f"{self._monitor} has not improved in {since} evaluations; the best is {self._sign * best:.4g}")


class Hooks:
    """Calls callbacks in order, and stops all workers if any callback asks for it.

    Args:
        called: This worker's callbacks by event.
        events: Events with a callback on any worker; all workers take part in the collectives of these.
        say: Prints lines.
    """

    last_step = sys.maxsize
    """The step after which callbacks stopped the run."""

    def __init__(
        self,
        called: Mapping[str, Sequence[Callback]],
        events: Collection[str],
        world: World,
        state: TrainingState,
        say: Callable[[Sequence[str]], None],
    ):
        self._called, self._events, self._world, self._state, self._say = called, events, world, state, say
        self._announced = -1  # the step of the last on_checkpoint

    def begin_epoch(self) -> None:
        self._state.epoch = self._state.step // self._state.steps_per_epoch + 1
        self._call("on_epoch_begin")

    def begin_step(self) -> None:
        self._call("on_step_begin", agree=False)

    def end_step(self) -> None:
        self._call("on_step_end", agree=False)

    def agree(self) -> None:
        """Stop all workers here if a callback of the step asked for it. Collective."""
        if not {"on_step_begin", "on_step_end"}.isdisjoint(self._events):
            self._agree()

    def end_epoch(self, figures: Mapping[str, Any]) -> None:
        self._call("on_epoch_end", figures)

    def saved(self, checkpoints: Checkpoints, folder: Path) -> None:
        """Called when a checkpoint is being written to `folder` in the background."""
        # A run that is stopped at a checkpoint writes it again after the evaluation.
        if "on_checkpoint" not in self._events or self._announced == self._state.step == self.last_step:
            return
        with suppress(CheckpointError):  # reported elsewhere
            checkpoints.wait()
        newest = checkpoint_folder.newest(folder) if self._world.is_main else None
        is_there = newest is not None and checkpoint_folder.step_of(newest) == self._state.step
        path = self._world.from_main(str(newest) if is_there else None)
        if path:
            self._announced = self._state.step
            self._call("on_checkpoint", Path(path))

    def _call(self, event: str, *arguments: Any, agree: bool = True) -> None:
        for callback in self._called[event]:
            getattr(callback, event)(self._state, *arguments)
        if agree and self._events:
            self._agree()

    def _agree(self) -> None:
        if self.last_step <= self._state.step:
            return
        reason = self._state.take_request()
        asked = torch.tensor([reason is not None], dtype=torch.int32, device="cpu")
        if not self._world.max_(asked).item():
            return
        reasons = [each for each in self._world.gather(reason) if each]
        self.last_step = self._state.step
        self._say([f"stopping after step {self._state.step:,}: {reasons[0]}"])


def build_hooks(
    callbacks: Sequence[Callback], world: World, state: TrainingState, say: Callable[[Sequence[str]], None]
) -> Hooks:
    """Build the hooks that call these callbacks. Collective; the callbacks may differ between workers.

    Raises:
        ConfigError: An object is not a callback.
    """
    for callback in callbacks:
        missing = [name for name in _EVENTS if not callable(getattr(callback, name, None))]
        if isinstance(callback, type) or missing:
            problem = "is a class, not an instance" if isinstance(callback, type) else f"has no {missing[0]}"
            raise ConfigError(f"callbacks=: {callback!r:.80} {problem}; pass instances of lockstep.train.Callback")
    called = {name: [each for each in callbacks if _overrides(each, name)] for name in _EVENTS}
    return Hooks(called, world.union(name for name in _EVENTS if called[name]), world, state, say)


_EVENTS = ("on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end", "on_checkpoint")


def _overrides(callback: Callback, event: str) -> bool:
    """Return whether a callback overrides the method of an event."""
    return getattr(type(callback), event, None) is not getattr(Callback, event)
