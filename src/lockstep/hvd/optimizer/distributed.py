"""DistributedOptimizer: wraps the user's optimizer so that its steps use the gradients of all workers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

import torch

from lockstep.hvd import basics
from lockstep.hvd.compression import Compression, Compressor
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.request import ADASUM, AVERAGE, OPERATION_NAMES, SUM
from lockstep.hvd.ops.allreduce import resolve_operation
from lockstep.hvd.optimizer.adasum_optimizer import AdasumOptimizer
from lockstep.hvd.optimizer.gradient_optimizer import GradientOptimizer, Wrapper, check_passes, name_parameters
from lockstep.hvd.optimizer.gradient_reducer import Gradients
from lockstep.hvd.optimizer.reductions import GradientOptions
from lockstep.hvd.optimizer.replica_watch import ReplicaWatch
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor
COPY = "copy."  # in the names of the operations of copies
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> AnyOptimizer:
    """Wrap an optimizer so that all workers take the same step, with the average of their gradients.

    Gradients are reduced during the backward pass, and `backward` waits for them. What a backward pass has left out,
    because gradients are missing, is reduced by `step`.

    Args:
        optimizer: Any optimizer of torch.optim, or a custom one. The result shares its parameter groups and state.
        named_parameters: `model.named_parameters()`; names the operations, and orders them, whatever the order of the
            optimizer's groups.
        compression: For communication, such as `Compression.fp16`.
        backward_passes_per_step: The number of backward passes whose gradients are summed before the reduction.
        op: Average, Sum, Min, Max, Product, or Adasum (which combines steps instead of gradients).
        gradient_predivide_factor: f: gradients are multiplied by 1/f before the sum and f/size after it.
        num_groups: Deprecated; use groups.
        groups: A number of groups of consecutive parameters, or lists of parameters, to reduce together.
        sparse_as_dense: Whether to reduce sparse gradients as dense ones.
        process_set: The workers that train this model.

    Returns:
        An instance of a subclass of the optimizer's class.

    Raises:
        ValueError: An argument is invalid, or Horovod is not initialized.
        TypeError: The process set is not registered.
        NotImplementedError: op=Adasum with a process set other than the global one.
    """
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` is deprecated; use `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    check_passes(backward_passes_per_step)
    devices = {parameter.device for group in optimizer.param_groups for parameter in group["params"]}
    if len(devices) > 1:
        raise ValueError(
            f"parameters are on {sorted(map(str, devices))}; a DistributedOptimizer needs all of them on one device"
        )
    if isinstance(optimizer, Wrapper):
        raise ValueError("this optimizer is already a DistributedOptimizer")
    context = engine.get(connected=True)
    given = _given_names(optimizer, named_parameters)
    op = resolve_operation(op, None)
    adasum = op == ADASUM and (context.rank_info.size > 1 or context.settings.elastic)
    if process_set.process_set_id is None:
        raise TypeError(f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()")
    if adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets.")
    named = name_parameters(optimizer.param_groups, given)
    _check_complex(named, op)
    group_indices = check_groups(groups, [parameter for _, parameter in named])
    options = GradientOptions(
        compression,
        group_indices,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
    )
    # Numbered per process set, because workers outside the set do not count such an optimizer, and from each hvd.init()
    # on, because a new worker of an elastic job must get the same numbers.
    number = context.count(engine.OPTIMIZER, process_set.process_set_id) if _reduces(process_set) else 0
    return _wrap(optimizer, named, options, adasum, f"optimizer{number}." if number else "")


def _reduces(process_set: ProcessSet) -> bool:
    """Return whether an optimizer exchanges anything with other workers."""
    return (basics.size() > 1 or engine.get().settings.elastic) and bool(process_set.included())


def _wrap(
    optimizer: AnyOptimizer,
    named: Sequence[tuple[str, Tensor]],
    options: GradientOptions,
    adasum: bool,
    prefix: str,
    required: set[Tensor] | None = None,
) -> AnyOptimizer:
    """Return the DistributedOptimizer.

    Args:
        named: All parameters of the optimizer, in the same order on all workers.
        prefix: Of the names of operations, the same on all workers.
        required: What a script has assigned to `_requires_update`.
    """
    base: type = AdasumOptimizer if adasum else GradientOptimizer
    attributes = {"__module__": "horovod.torch.optimizer", "__reduce_ex__": _reduce}
    wrapper: Any = object.__new__(type(optimizer.__class__.__name__, (base, optimizer.__class__), attributes))
    wrapper.__dict__.update(optimizer.__dict__)
    wrapper.__dict__.pop("step", None)  # set by an earlier scheduler on the wrapped optimizer
    wrapper._ordered_names = {parameter: name for name, parameter in named}
    wrapper._parameter_names = dict(sorted(wrapper._ordered_names.items(), key=itemgetter(1)))
    wrapper._compression = options.compression
    wrapper._wrapped = optimizer
    wrapper._made_of, wrapper._required = (options, adasum, prefix), required
    reduces = _reduces(options.process_set)
    if reduces:
        name = f"{prefix or 'optimizer0.'}{min(name for name, _ in named)}"
        wrapper._replica_watch = ReplicaWatch(name, options.process_set)
    if adasum:
        wrapper.backward_passes_per_step = options.passes
    else:
        wrapper.op = options.operation
        wrapper.gradient_predivide_factor = options.predivide
        wrapper.sparse_as_dense = options.sparse_as_dense
        wrapper.process_set = options.process_set
        wrapper._passes = options.passes
        if reduces:
            trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
            wrapper._gradients = Gradients(trained, options, prefix, wrapper)
        else:
            wrapper._gradients = Gradients([], replace(options, groups=()))
    distributed: AnyOptimizer = wrapper
    return distributed


def _reduce(wrapper: Any, protocol: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Let copy and pickle make a DistributedOptimizer of the copied optimizer.

    All copies of an optimizer have the same names of operations: they need not be numbered, so a worker may make more
    copies than others, for example to keep the best one.
    """
    options, adasum, prefix = wrapper._made_of
    options = replace(options, passes=wrapper.backward_passes_per_step)
    prefix = prefix if prefix.endswith(COPY) else f"{prefix}{COPY}"
    return _wrap, (wrapper._wrapped, wrapper._named_own_parameters(), options, adasum, prefix, wrapper._required)


def _given_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the names in `named_parameters`, by parameter.

    Raises:
        ValueError: The pairs are malformed, a name is not unique, or a parameter has none.
    """
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    nameless = [
        f"number {index} of group {number}, shape {list(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if nameless and pairs:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {'; '.join(nameless)}"
        )
    return names


def _check_complex(named: Sequence[tuple[str, Tensor]], op: int) -> None:
    """Raise ValueError if a parameter is complex and `op` needs an order or more than sums."""
    name = next((name for name, parameter in named if parameter.is_complex()), None)
    if name is not None and op not in (AVERAGE, SUM):
        raise ValueError(
            f"parameter {name!r} is complex; op={OPERATION_NAMES[op]} cannot reduce it, use op=hvd.Average"
        )


def check_groups(groups: Any, parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return the groups as indices into the parameters that require gradients.

    Raises:
        ValueError: `groups` is neither a positive integer nor a list of lists of tensors, or repeats a tensor.
    """
    indices_of = {parameter: index for index, parameter in enumerate(p for p in parameters if p.requires_grad)}
    if groups is None:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise ValueError("groups should be a positive integer or a list of list of tensors.")
        count = min(groups, len(indices_of)) or 1
        bounds = [len(indices_of) * number // count for number in range(count + 1)]
        return [list(range(start, end)) for start, end in pairwise(bounds)]
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and all(isinstance(tensor, Tensor) for tensor in group) for group in groups
    ):
        raise ValueError("groups should be a positive integer or a list of list of tensors.")
    members = [tensor for group in groups for tensor in group]
    if len(set(members)) != len(members):
        raise ValueError("A parameter can only appear once in groups.")
    found = [sorted(indices_of[tensor] for tensor in group if tensor in indices_of) for group in groups]
    return sorted(indices for indices in found if indices)
