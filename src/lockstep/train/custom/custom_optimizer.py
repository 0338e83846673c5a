"""Custom optimizers: an object over the model's parameters, or a function that builds one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from lockstep.errors import ConfigError
from lockstep.train.strategies import Strategy

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
            f"optimizer={given!r:.80}: must be a name (sgd, adam, adamw, lars, lamb), a torch.optim.Optimizer over "
            f"model.parameters(), or a function that builds one from the parameters"
        )
    _check(optimizer)
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


def _check(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "optimizer=LBFGS evaluates the loss several times per step, which fit() does not support; use another one"
        )
    check_savable(optimizer)


def check_savable(optimizer: Optimizer) -> None:
    """Check that a checkpoint can store the optimizer.

    Raises:
        ConfigError: The groups or the state contain an unsupported value.
    """
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and not _is_json(value):
                raise ConfigError(
                    f"optimizer=: its {name} is a {type(value).__name__}, which a checkpoint cannot store; use a number"
                )
    for state in optimizer.state.values():
        for name, value in state.items():
            if not _is_savable(value):
                raise ConfigError(
                    f"optimizer=: its {name} is a {type(value).__name__}, which a checkpoint cannot store; use an "
                    f"optimizer whose state is tensors, numbers and lists of them"
                )


def _is_savable(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_savable, value))
    return isinstance(value, torch.Tensor) or _is_json(value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
