"""Collect the states of a user's own loop for a checkpoint, by the names that the user gave them, and restore them.

Each worker stores its part of sharded tensors (FSDP2's), and any number of workers can resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ConfigError
from lockstep.models.nested import map_tensors
from lockstep.models.optimizer_state import load_optimizer_state
from lockstep.train.checkpoints import state_tree
from lockstep.train.checkpoints.sharded import StoredTensor, restored_as, shard_of
from lockstep.train.checkpoints.snapshot import Tensors, TensorShard
from lockstep.train.optim.build import restore_layouts


@runtime_checkable
class Stateful(Protocol):
    """What a run can save: an optimizer, a scheduler, or anything of yours."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def layers_of_wrapping(model: nn.Module) -> list[nn.Module]:
    """Return a model and what it wraps, by DistributedDataParallel and torch.compile, down to the user's model."""
    found = [model]
    while True:
        last = found[-1]
        inner = last.module if isinstance(last, DistributedDataParallel) else getattr(last, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return found
        found.append(inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's model, without DistributedDataParallel and torch.compile."""
    return layers_of_wrapping(model)[-1]


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def gather_states(states: Mapping[str, Any], is_main: bool) -> tuple[Tensors, dict[str, Any]]:
    """Return the models' tensors, and everything else by the names of the states. Collective.

    The tensors of a single model have no prefix. Sharded ones are `TensorShard`s; the others are empty on all workers
    but rank 0.

    Raises:
        ConfigError: A value is neither a tensor nor JSON.
    """
    tensors, others = Tensors(), dict[str, Any]()
    models = _models(states)
    for name, model in models.items():
        for key, value in model.state_dict(prefix=_prefix(name, models)).items():
            (tensors if isinstance(value, torch.Tensor) else others.setdefault(name, {}))[key] = value
    others |= {name: each.state_dict() for name, each in states.items() if name not in models}
    for name, each in others.items():
        check_storable(each, name)
    stored = partial(_stored, is_main=is_main)
    return map_tensors(stored, tensors), map_tensors(stored, others)


def check_storable(state: Any, name: str) -> None:
    """Check that a checkpoint can store a state.

    Raises:
        ConfigError: A value is neither a tensor nor JSON; the message says where it is.
    """
    try:
        state_tree.split(state, name, {})
    except TypeError as error:
        raise ConfigError(f"{error}, which a checkpoint cannot store") from None


def restore_states(states: Mapping[str, Any], tensors: Tensors, others: Mapping[str, Any]) -> None:
    """Restore the states from what `gather_states` returned. Collective if tensors are sharded."""
    models = _models(states)
    for name, model in models.items():
        prefix = _prefix(name, models)
        own = {key: value for key, value in tensors.items() if key.startswith(prefix)} | others.get(name, {})
        parameters = dict(model.named_parameters(prefix=prefix.removesuffix(".")))
        own = {key.removeprefix(prefix): _sharded_as(parameters.get(key), value) for key, value in own.items()}
        model.load_state_dict(own)
    for name, each in states.items():
        if isinstance(each, torch.optim.Optimizer):
            load_optimizer_state(each, _sharded_state(each, others[name]), keep_devices=False)
            restore_layouts(each)
        elif name not in models:
            each.load_state_dict(map_tensors(partial(_sharded_as, None), others[name], _is_stored))


def _is_stored(value: Any) -> bool:
    return isinstance(value, StoredTensor)


def _models(states: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: unwrapped(each) for name, each in states.items() if isinstance(each, nn.Module)}


def _prefix(name: str, models: Mapping[str, nn.Module]) -> str:
    return f"{name}." if len(models) > 1 else ""


def _stored(tensor: torch.Tensor, is_main: bool) -> torch.Tensor | TensorShard:
    if isinstance(tensor, DTensor):
        if (shard := shard_of(tensor)) is not None:
            return shard
        tensor = tensor.full_tensor()
        return tensor.cpu() if is_main else torch.empty(0)
    return tensor if is_main else torch.empty(0)


def _sharded_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {name: _sharded_as(parameters[index], value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": entries}


def _sharded_as(parameter: torch.Tensor | None, value: Any) -> Any:
    """Return a value, sharded as a parameter of its shape is, else whole. Collective if it is stored whole."""
    if isinstance(value, StoredTensor):
        if isinstance(parameter, DTensor) and value.shape == tuple(parameter.shape):
            restored = restored_as(parameter, value)
            if restored is not None:
                return restored
        value = value.whole()
    if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value
