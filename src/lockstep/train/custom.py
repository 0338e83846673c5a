"""User-defined parts of a run, besides the model and the data: the loss, the optimizer and its schedule, metrics.

A custom optimizer is an object over the model's parameters, or a function that builds one. The learning rates may be
set by a torch scheduler, or by the optimizer itself. Checkpoints store no scheduler state: after a resume,
the scheduler's steps are replayed from the first one, which gives the same rates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.config.schema import OptimConfig
from lockstep.errors import ConfigError
from lockstep.run.checkpoints.snapshot import split_state
from lockstep.train.callbacks import Callback
from lockstep.train.history import EpochRecords
from lockstep.train.metrics import Loss, Metric
from lockstep.train.strategies import Strategy


@dataclass(frozen=True)
class CustomParts:
    """User-defined parts that replace or extend the built-in ones."""

    loss: Loss | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    optimizer: Optimizer | OptimizerFactory | None = None
    scheduler: LRScheduler | SchedulerFactory | None = None
    scheduler_interval: Literal["epoch", "step"] = "epoch"


OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Maps trainable parameters to an optimizer: torch.optim.AdamW, or partial(torch.optim.SGD, lr=0.1)."""

COMPUTED_BY = ("fused", "foreach", "capturable", "differentiable")
"""Keys of an optimizer's groups that select an implementation; they may differ between sessions."""


def take_optimizer(
    given: Optimizer | OptimizerFactory,
    before: Sequence[nn.Parameter],
    weights: nn.Module,
    strategy: Strategy,
    shards: bool,
) -> Optimizer:
    """Return the optimizer, over the parameters of `weights`.

    Args:
        before: The parameters of the user's model, in the same order as in `weights`.
        shards: Whether the optimizer's state is sharded over the workers.

    Raises:
        ConfigError: `given` is not an optimizer, or the training loop does not support it.
    """
    optimizer: Any = None
    if isinstance(given, Optimizer):
        if shards:
            raise ConfigError(
                "shard_optimizer=True needs optimizer= as a function of the parameters, such as torch.optim.AdamW or "
                "functools.partial(torch.optim.SGD, lr=0.1); each worker calls it with its shard"
            )
        optimizer = given
        _move(optimizer, dict(zip(map(id, before), weights.parameters(), strict=True)))
    elif callable(given):
        trained = [parameter for parameter in weights.parameters() if parameter.requires_grad]
        optimizer = strategy.build_optimizer(given, trained, {})  # type: ignore[arg-type]  # called like a class
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={given!r:.80}: must be a name (sgd, adam, adamw, lars, lamb, muon), a torch.optim.Optimizer "
            f"over model.parameters(), or a function that builds one from the parameters"
        )
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "optimizer=LBFGS evaluates the loss several times per step, which fit() does not support; use another one"
        )
    check_savable(optimizer)
    return optimizer


def _move(optimizer: Optimizer, parameters: Mapping[int, nn.Parameter]) -> None:
    """Replace an optimizer's parameters; `parameters` maps the id of each old parameter to the new one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in parameters:
                raise ConfigError(
                    f"optimizer= holds a tensor of shape {list(parameter.shape)} that is not in the model; "
                    f"build it over model.parameters()"
                )
    state = optimizer.state_dict() if optimizer.state else None
    for group in optimizer.param_groups:
        group["params"] = [parameters[id(parameter)] for parameter in group["params"]]
    if state is not None:
        optimizer.state.clear()
        optimizer.load_state_dict(state)  # on the device, and in the precision, of the parameters


def check_savable(optimizer: Optimizer) -> None:
    """Check that a checkpoint can store the optimizer.

    Raises:
        ConfigError: The groups or the state contain an unsupported value.
    """
    # Not the state_dict, which may be sharded.
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    try:
        for group in settings:
            if tensor := next((name for name, value in group.items() if isinstance(value, torch.Tensor)), None):
                raise TypeError(f"{tensor} is a Tensor")
            split_state(group, "", {})
        for state in optimizer.state.values():
            split_state(state, "", {})
    except TypeError as error:
        raise ConfigError(
            f"optimizer=: its {error}, which a checkpoint cannot store; use numbers as settings, and a state of "
            f"tensors, numbers, texts, and lists and mappings of them"
        ) from None


SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum")
"""Keys that torch's schedulers change or store in an optimizer's groups."""

SchedulerFactory = Callable[[Optimizer], LRScheduler]


class CustomSchedule:
    """Uses the learning rates in the optimizer's groups; steps the scheduler, if any, that changes them.

    Args:
        interval: Step the scheduler after each optimizer step taken, or after each epoch.
        epochs: Records with the validation losses for ReduceLROnPlateau.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: LRScheduler | SchedulerFactory | None,
        interval: Literal["epoch", "step"],
        epochs: EpochRecords,
        steps_per_epoch: int,
    ):
        """Raise ConfigError if `scheduler` is not a scheduler, or belongs to another optimizer."""
        self.peak = max(float(group["lr"]) for group in optimizer.param_groups)
        self._scheduler = _take_scheduler(scheduler, optimizer)
        if interval not in ("epoch", "step"):
            raise ConfigError(f"scheduler_interval={interval!r}: must be 'epoch' or 'step'")
        if interval == "step" and isinstance(self._scheduler, ReduceLROnPlateau):
            raise ConfigError(
                'scheduler_interval="step" does not work with ReduceLROnPlateau, which needs the validation loss of '
                'each epoch; use "epoch"'
            )
        self._by_step, self._epochs, self._steps_per_epoch = interval == "step", epochs, steps_per_epoch
        self._done = 0
        self._is_new = True

    def apply(self, optimizer: Optimizer, steps_taken: int, steps: int) -> None:
        """Set the rates of the next step, as `Schedule.apply` does."""
        if self._scheduler is None:
            return
        target = steps_taken if self._by_step else steps // self._steps_per_epoch
        with warnings.catch_warnings() if self._is_new else nullcontext():
            if self._is_new:  # after a resume, torch warns that the optimizer took none of these steps
                warnings.simplefilter("ignore", UserWarning)
            for _ in range(self._done, target):
                self._advance()
        self._is_new = False

    def describe(self, config: OptimConfig, global_batch: int) -> str:
        """Describe the rate and its schedule."""
        changes = "constant"
        if self._scheduler:
            changes = f"{type(self._scheduler).__name__}, each {'step' if self._by_step else 'epoch'}"
        return f"{self.peak:g}, set by the optimizer; {changes}"

    def describe_missing(self, steps: int) -> list[str]:
        """Return a line if the records lack validation losses that the scheduler needs, else no line."""
        epochs = steps // self._steps_per_epoch
        known = set(self._epochs.history().val["epoch"])
        missing = [epoch for epoch in range(1, epochs + 1) if epoch not in known]
        if not missing or not isinstance(self._scheduler, ReduceLROnPlateau):
            return []
        which = f"epoch {missing[0]}" if len(missing) == 1 else f"{len(missing)} epochs, the first {missing[0]}"
        return [f"ReduceLROnPlateau continues without the validation loss of {which}: not in the records"]

    def _advance(self) -> None:
        self._done += 1
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            assert self._scheduler
            self._scheduler.step()
            return
        val = self._epochs.history().val
        for loss in val["loss"][val["epoch"] == self._done]:
            self._scheduler.step(float(loss))


def _take_scheduler(given: LRScheduler | SchedulerFactory | None, optimizer: Optimizer) -> LRScheduler | None:
    if given is None:
        return None
    scheduler = given(optimizer) if callable(given) and not isinstance(given, LRScheduler) else given
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(
            f"scheduler={given!r:.80}: must be a torch.optim.lr_scheduler scheduler of optimizer=, or a function that "
            f"builds one from the optimizer, such as lambda optimizer: StepLR(optimizer, 30)"
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigError(
            "scheduler= was built for another optimizer; pass that one as optimizer=, or pass a function from the "
            "optimizer to a scheduler"
        )
    return scheduler
