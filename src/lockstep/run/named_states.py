"""Collect the states of a run for a checkpoint, by the names that the trainer or a user gave them, and restore them.

Each worker stores its part of sharded tensors (FSDP2's), and any number of workers can resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.data.exact_loader import ExactLoader
from lockstep.data.seeded_samples import digest_of
from lockstep.errors import ConfigError
from lockstep.models.buffers import load_state
from lockstep.models.nested import leaves, map_tensors
from lockstep.models.optimizer_state import load_keeping_flags
from lockstep.run.checkpoints.sharded import StoredTensor, restored_as, shard_of
from lockstep.run.checkpoints.snapshot import Tensors, TensorShard, split_state

EXTRA = ""  # the name of `TrainingRun.extra` among the states


@runtime_checkable
class Stateful(Protocol):
    """What a run can save: an optimizer, a scheduler, or anything of yours."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class OptimizerState:
    """An optimizer among the states of a run.

    Args:
        kept: Keys of the parameter groups that keep this session's values in a resume; None: all.
        has_same_dtypes: Returns whether the parameters have the dtypes that they had in the checkpoint.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kept: Collection[str] | None = (),
        has_same_dtypes: Callable[[], bool] = lambda: True,
    ):
        self.optimizer, self._kept, self._has_same_dtypes = optimizer, kept, has_same_dtypes

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, on rank 0 at least. Collective."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
            if dist.get_rank():
                return {}
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = _sharded_state(self.optimizer, state)
        load_keeping_flags(self.optimizer, state, self._kept, self._has_same_dtypes())


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


def gather_states(
    states: Mapping[str, Any], stores_whole: bool, in_parts: bool, hold: Callable[[Tensors], Tensors] = dict
) -> tuple[Tensors, dict[str, Any]]:
    """Return the models' tensors, and everything else by the names of the states. Collective.

    The tensors of a single model have no prefix. Sharded ones are `TensorShard`s.

    Args:
        stores_whole: Whether this worker writes the other tensors, which are empty if not.
        in_parts: Whether each worker writes its parts of sharded tensors; else rank 0 gets them whole.
        hold: Called with the models' buffers, which the next forward pass changes; returns what to store.

    Raises:
        ConfigError: A value is neither a tensor nor JSON, or a tensor has the shape of this worker's part.
    """
    tensors, buffers, others = Tensors(), set[str](), dict[str, Any]()
    models = _models(states)
    for name, model in models.items():
        stored_names = _without_wrappers(model)
        own_buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for key, value in model.state_dict().items():
            stored_name = _prefix(name, models) + stored_names.get(key, key)
            (tensors if isinstance(value, torch.Tensor) else others.setdefault(name, {}))[stored_name] = value
            buffers |= {stored_name} if key in own_buffers else set()
    for name, each in states.items():
        if name not in models:
            others[name] = (OptimizerState(each) if isinstance(each, Optimizer) else each).state_dict()
    for name, each in others.items():
        check_storable(each, name or "extra")
    for name, each in states.items():
        if isinstance(each, Optimizer):
            _check_whole(each, name)
    stored = partial(_stored, stores_whole=stores_whole, in_parts=in_parts)
    tensors = map_tensors(stored, tensors)
    held = hold({name: each for name, each in tensors.items() if name in buffers}) if stores_whole else {}
    return {**tensors, **held}, map_tensors(stored, others)


def _check_whole(optimizer: Optimizer, name: str) -> None:
    """Check that the state of a sharded parameter is whole or sharded, too: rank 0's tensors are stored."""
    for parameter, entries in optimizer.state.items():
        part = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        if part != parameter.shape and part.numel() > 1:
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == part:
                    raise ConfigError(
                        f"{name}: {key} has the shape of one worker's part of a sharded parameter, but is an ordinary "
                        f"tensor, of which only worker 0's would be stored; make it by torch.zeros_like(parameter)"
                    )


def restore_states(states: Mapping[str, Any], tensors: Tensors, others: Mapping[str, Any]) -> None:
    """Restore the states from what `gather_states` returned, models first. Collective if tensors are sharded."""
    models = _models(states)
    for name, model in models.items():
        prefix = _prefix(name, models)
        own = {key: value for key, value in tensors.items() if key.startswith(prefix)} | others.get(name, {})
        names = {stored: key for key, stored in _without_wrappers(model).items()}
        own = {key.removeprefix(prefix): value for key, value in own.items()}
        own = {names.get(key, key): value for key, value in own.items()}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        load_state(model, {key: _sharded_as(parameters.get(key), value) for key, value in own.items()})
    for name, each in states.items():
        if isinstance(each, Optimizer | OptimizerState):
            (each if isinstance(each, OptimizerState) else OptimizerState(each)).load_state_dict(others[name])
        elif name not in models:
            each.load_state_dict(_as_in(each.state_dict(), others[name]))


def _as_in(now: Any, stored: Any) -> Any:
    """Return a stored state, with its tensors sharded as those of a state in the same places."""
    if isinstance(stored, Mapping):
        inner = now if isinstance(now, Mapping) else {}
        return {key: _as_in(inner.get(key), value) for key, value in stored.items()}
    if isinstance(stored, list | tuple):
        known = now if isinstance(now, list | tuple) and len(now) == len(stored) else [None] * len(stored)
        return type(stored)(_as_in(*pair) for pair in zip(known, stored, strict=True))
    return _sharded_as(now, stored)


def _models(states: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {name: unwrapped(each) for name, each in states.items() if isinstance(each, nn.Module)}


def _without_wrappers(model: nn.Module) -> dict[str, str]:
    """Map a model's state names to those without DistributedDataParallel and torch.compile in it.

    The number of workers decides whether they are, such as in torch's AveragedModel of a prepared model.
    """
    names = {key: key for key in model.state_dict(keep_vars=True)}
    for path, module in reversed([*model.named_modules(remove_duplicate=False)]):  # inner ones first
        wrapped = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"
        if isinstance(module, DistributedDataParallel) or hasattr(module, wrapped):
            outer = f"{path}." if path else ""
            inner = f"{outer}{wrapped}."
            names = {
                key: outer + name.removeprefix(inner) if name.startswith(inner) else name for key, name in names.items()
            }
    return names


def _prefix(name: str, models: Mapping[str, nn.Module]) -> str:
    return f"{name}." if len(models) > 1 else ""


def _stored(tensor: torch.Tensor, stores_whole: bool, in_parts: bool) -> torch.Tensor | TensorShard:
    if tensor.dtype in (torch.complex128, torch.complex32):  # safetensors has no code for them
        raise ConfigError(f"no checkpoint can store {tensor.dtype}: keep such tensors as torch.view_as_real() of them")
    if isinstance(tensor, DTensor):
        if in_parts and (shard := shard_of(tensor)) is not None:
            return shard
        tensor = tensor.full_tensor()
        return tensor.cpu() if stores_whole else torch.empty(0)
    return tensor if stores_whole else torch.empty(0)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | StoredTensor)


def _sharded_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    entries = {
        index: map_tensors(partial(_sharded_as, parameters.get(index)), values, _is_tensor)
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


def places_of(states: Iterable[Any]) -> set[int]:
    """Return where in memory the tensors are."""
    tensors = [each for state in states for each in leaves(state) if isinstance(each, torch.Tensor)]
    return {(each.to_local() if isinstance(each, DTensor) else each).data_ptr() for each in tensors}


SETTINGS, CHANGED = "settings", "changed by the loop"  # in the job of a checkpoint, with what must be equal
LONG = 100  # characters: a text is data, not a setting
NOT_REPEATED = (
    "{} was {} when the checkpoint was written, but is {} as at the start of the script{}: a resumed run does not "
    "repeat what the loop changes under `if epoch == 1:`; write `if epoch >= 1:`"
)
OTHER_ORDER = "{} differs from the one before the resume: keep what the sampler needs at the epoch's start in run.extra"


class LoopChanges:
    """What a loop has changed in models and data sets, such as requires_grad or a dropout's p: no state has it.

    Attributes:
        settings: Those of the script when the run began, from the restored checkpoint.
    """

    def __init__(self, states: Mapping[str, Any]):
        self._states, self._stored, self.settings = states, dict[str, str](), dict[str, Any]()
        self._first = dict(self._values())

    def restore(self, job: Mapping[str, Any]) -> None:
        """Take what the job of a checkpoint has; raise TypeError if it is damaged."""
        self._stored, self.settings = {**job.get(CHANGED, {})}, {**job.get(SETTINGS, {})}

    def now(self) -> dict[str, str]:
        return {name: value for name, value in self._values() if self._first.get(name) != value}

    def not_repeated(self) -> list[str]:
        """Return lines on what a resumed loop has not changed again in its first step; later, nothing."""
        now, stored, self._stored = dict(self._values()) if self._stored else {}, self._stored, {}
        lost = [name for name in stored if name in now and stored[name] != now[name] == self._first.get(name)]
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        lines = [NOT_REPEATED.format(name, stored[name], now[name], more) for name in lost[:1]]
        others = [name for name in stored if "order of epoch" in name and now.get(name, stored[name]) != stored[name]]
        return lines + [OTHER_ORDER.format(name) for name in others]

    def _values(self) -> Iterator[tuple[str, str]]:
        for name, each in self._states.items():
            model = unwrapped(each) if isinstance(each, nn.Module) else nn.Module()
            yield from ((f"{name}.{key}.requires_grad", str(p.requires_grad)) for key, p in model.named_parameters())
            owners = {path: vars(module) for path, module in model.named_modules()}
            if isinstance(each, ExactLoader):
                yield from ((f"{order} of {name}=", digest) for order, digest in each.order.items())
                owners = {"dataset": {**vars(type(each.dataset)), **getattr(each.dataset, "__dict__", {})}}
                owners["sampler"] = getattr(each.sampler, "__dict__", {})
            for path, own in owners.items():
                for key, value in own.items():
                    if path == "sampler" and hasattr(value, "dtype"):  # such as weights
                        value = digest_of([value])[:8]
                    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) < LONG)
                    if is_plain and key[0] != "_" and key != "training":
                        yield ".".join(filter(None, (name, path, key))), repr(value)


class Extra(dict[str, Any]):
    """A dictionary among the states of a run that refuses values which no checkpoint can store when they are set.

    Raises:
        ConfigError: A value, or one in it, is neither a tensor nor JSON.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        check_storable(value, f"extra.{key}")
        super().__setitem__(key, value)

    setdefault, update = MutableMapping.setdefault, MutableMapping.update  # by __setitem__

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.update(state)

    def __ior__(self, values: Mapping[str, Any]) -> Extra:  # type: ignore[override,misc]
        self.update(values)
        return self


def check_storable(state: Any, name: str) -> None:
    """Check that a checkpoint can store a state.

    Raises:
        ConfigError: A value is neither a tensor nor JSON; the message says where it is.
    """
    try:
        split_state(state, name, {})
    except TypeError as error:
        raise ConfigError(f"{error}, which a checkpoint cannot store") from None
