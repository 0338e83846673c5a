"""Functions of the caller's that the training loop calls, and through which it may be ended on all workers together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.checkpoints import checkpoint_folder
from lockstep.train.job_parts import Saving
from lockstep.train.monitoring.history import EpochRecords, History
from lockstep.train.progress import Progress
from lockstep.world.world import World


class TrainingState:
    """The run as callbacks see it, on every worker; all but `rank` and times in the history is the same on each."""

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
        """The model whose weights the optimizer changes."""
        self.optimizer = optimizer
        self.steps_per_epoch = steps_per_epoch
        self.run_dir = run_dir
        self.epoch = max(1, -(-progress.step // steps_per_epoch))
        """The epoch that is under way or was the last, from 1."""
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
        """The figures of the epochs so far, also from before a resume."""
        return self._epochs.history()

    def stop(self, reason: str = "") -> None:
        """End the run after this step or epoch, with an evaluation, a checkpoint and a result, on all workers together.

        It is enough that one worker asks.
        """
        self._reason = self._reason or reason or "a callback"

    def take_request(self) -> str | None:
        """Why this worker was asked to stop since the last call; None: it was not."""
        reason, self._reason = self._reason, None
        return reason


class Callback(Protocol):
    """What the training loop calls, on every worker. A subclass overrides what it needs; here nothing is done.

    With several workers, `on_step_begin` and `on_step_end` have all agree on the host after every step whether one
    asked to stop; the other events are rare enough for that to cost nothing.

    Each method returns explicitly, or type checkers would take it for abstract.
    """

    def on_epoch_begin(self, run: TrainingState) -> None:
        """Before an epoch's first step, also after a resume within it."""
        return

    def on_step_begin(self, run: TrainingState) -> None:
        """Before a step; `run.step` does not count it yet."""
        return

    def on_step_end(self, run: TrainingState) -> None:
        """After a step. Its loss is still on the device; figures come with the epoch's end."""
        return

    def on_epoch_end(self, run: TrainingState, figures: Mapping[str, Any]) -> None:
        """After an epoch's evaluation: loss, top1, top5, samples and the metrics, over all workers' samples."""
        return

    def on_checkpoint(self, run: TrainingState, path: Path) -> None:
        """A checkpoint is complete in the folder `path`, on the file system of rank 0."""
        return


class Hooks:
    """What the loop calls where nobody has a callback: nothing is done."""

    last_step = sys.maxsize
    """The step after which callbacks have ended the run."""

    def begin(self, state: TrainingState, tell: Callable[[str], None]) -> None:
        """The run begins; `tell` is for people."""

    def begin_epoch(self) -> None: ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def end_epoch(self, figures: Mapping[str, Any]) -> None: ...

    def saved(self, saving: Saving) -> None:
        """A checkpoint is being written in the background."""


class CallbackHooks(Hooks):
    """Calls callbacks in their order, and has all workers stop if any of them is asked to.

    Args:
        called: This worker's callbacks by event.
        events: Those at which any worker calls one, so that all take part in what follows.
    """

    def __init__(self, called: Mapping[str, Sequence[Callback]], events: Collection[str], world: World):
        self._called, self._events, self._world = called, events, world
        self._announced = -1  # the step of the last on_checkpoint

    def begin(self, state: TrainingState, tell: Callable[[str], None]) -> None:
        self._state, self._tell = state, tell

    def begin_epoch(self) -> None:
        self._state.epoch = self._state.step // self._state.steps_per_epoch + 1
        self._call("on_epoch_begin")

    def begin_step(self) -> None:
        self._call("on_step_begin", agree=False)

    def end_step(self) -> None:
        self._call("on_step_end", agree=not {"on_step_begin", "on_step_end"}.isdisjoint(self._events))

    def end_epoch(self, figures: Mapping[str, Any]) -> None:
        self._call("on_epoch_end", figures)

    def saved(self, saving: Saving) -> None:
        # A run that is ended at a checkpoint writes it again once it is evaluated.
        if "on_checkpoint" not in self._events or self._announced == self._state.step == self.last_step:
            return
        with suppress(CheckpointError):  # it was not written, which is said elsewhere
            saving.checkpoints.wait()
        newest = checkpoint_folder.newest(saving.folder.checkpoints) if self._world.is_main else None
        is_there = newest is not None and checkpoint_folder.step_of(newest) == self._state.step
        path = self._world.from_main(str(newest) if is_there else None)
        if path:
            self._announced = self._state.step
            self._call("on_checkpoint", Path(path))

    def _call(self, event: str, *arguments: Any, agree: bool = True) -> None:
        for callback in self._called[event]:
            getattr(callback, event)(self._state, *arguments)
        if agree and self.last_step > self._state.step:
            self._agree()

    def _agree(self) -> None:
        """End the run here if any worker was asked to."""
        reason = self._state.take_request()
        asked = torch.tensor([reason is not None], dtype=torch.int32)
        if not self._world.max_(asked).item():
            return
        reasons = [each for each in self._world.gather(reason) if each]
        self.last_step = self._state.step
        self._tell(f"stopping after step {self._state.step:,}: {reasons[0]}")


def build_hooks(callbacks: Sequence[Callback], world: World) -> Hooks:
    """What calls these callbacks. All workers call this; some may have callbacks that others lack.

    Raises:
        ConfigError: There is something that is no callback.
    """
    for callback in callbacks:
        missing = [name for name in _EVENTS if not callable(getattr(callback, name, None))]
        if isinstance(callback, type) or missing:
            problem = "is a class, not an instance" if isinstance(callback, type) else f"has no {missing[0]}"
            raise ConfigError(f"callbacks=: {callback!r:.80} {problem}; pass instances of lockstep.train.Callback")
    called = {name: [each for each in callbacks if _overrides(each, name)] for name in _EVENTS}
    events = world.union(name for name in _EVENTS if called[name])
    return CallbackHooks(called, events, world) if events else Hooks()


_EVENTS = ("on_epoch_begin", "on_step_begin", "on_step_end", "on_epoch_end", "on_checkpoint")


def _overrides(callback: Callback, event: str) -> bool:
    """Whether a callback does anything at an event."""
    return getattr(type(callback), event, None) is not getattr(Callback, event)
