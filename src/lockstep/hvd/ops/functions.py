"""Broadcast of models, optimizer states and objects; all-gather of objects; comparison of models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import cloudpickle
import torch

from lockstep.errors import ReplicasDifferError
from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.agreement import ORDER, differing_order
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.engine.transfers import SetConnections
from lockstep.hvd.exceptions import HorovodInternalError
from lockstep.hvd.ops.broadcast import broadcast_, broadcast_async_
from lockstep.hvd.ops.rows import allgather
from lockstep.hvd.ops.submission import submit, synchronize
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor
Replica = tuple[str, list[Any], str]  # host, fingerprints and processor; of `compare_order`: "", lists, ""


def broadcast_parameters(params: Mapping[str, Any] | list[Any], root_rank: int) -> None:
    """Overwrite tensors with those of one worker, in place.

    Args:
        params: `model.state_dict()`, or a list of tensors or of (name, tensor) pairs; the same on all workers.
        root_rank: The global rank of the worker whose values are sent.

    Raises:
        ValueError: `params` has another type.
        AttributeError: A value is not a tensor.
        HorovodInternalError: The workers have different names; also as `broadcast`.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        pairs = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    names = [str(getattr(tensor, "shape", None) if name is None else name) for name, tensor in pairs]
    compare_order("broadcast_parameters", sorted(names))
    handles = [broadcast_async_(tensor, root_rank, name) for name, tensor in pairs]
    for handle in handles:
        synchronize(handle)


@dataclass(frozen=True)
class _Placeholder:
    """Replaces a tensor in the pickled optimizer state; the tensor is broadcast separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str

    @classmethod
    def of(cls, tensor: Tensor) -> _Placeholder:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def allocate(self, devices: Mapping[str, torch.device]) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=devices.get(self.device_type, torch.device("cpu")))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and the hyper-parameters of one worker's optimizer to all workers.

    The root's state does not change, and no step is taken. The others get its dtypes, and have tensors on the CPU or on
    their own accelerator as the root has. If the root has no state, that of the others is cleared. A worker whose
    optimizer has no state gets zeros as the gradient of each parameter that requires one and has none, as in Horovod.

    Args:
        optimizer: Any of torch.optim, with the same parameters on all workers.
        root_rank: The global rank of the worker whose state is sent.
        model: If given, its embeddings with sparse=True get sparse zeros.

    Raises:
        ValueError: The optimizer is LBFGS, whose state differs in form between workers.
        HorovodInternalError: The workers' parameters differ in order, name or shape; also as `broadcast`.
        ReplicasDifferError: The workers have the same weights in different orders.
    """
    from lockstep.models.nested import leaves, map_tensors
    from lockstep.models.optimizer_state import load_optimizer_state

    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = engine.get_for_operation().rank_info.rank == root_rank
    own = optimizer.state_dict()
    if not own["state"]:
        _add_gradients(optimizer, model)
    outline = broadcast_object(map_tensors(_Placeholder.of, own) if is_root else None, root_rank, "optimizer_state")
    _compare_slots(optimizer, bool(outline["state"]))
    if is_root:
        state = own
    else:
        devices = {tensor.device.type: tensor.device for group in optimizer.param_groups for tensor in group["params"]}
        state = map_tensors(lambda tensor: tensor.allocate(devices), outline, _is_placeholder)
    for index, tensor in enumerate(leaf for leaf in leaves(state) if isinstance(leaf, Tensor)):
        broadcast_(tensor, root_rank, f"optimizer_state.{index}")
    if not is_root:
        load_optimizer_state(optimizer, state)


def _compare_slots(optimizer: torch.optim.Optimizer, has_state: bool) -> None:
    """Compare the parameters by index, as their states are broadcast; without states, only those of each group."""
    known = getattr(optimizer, "_ordered_names", {})
    names: list[str] = []
    for number, group in enumerate(optimizer.param_groups):
        own = [f"{known.get(each, 'parameter')} {[*each.shape]}" for each in group["params"]]
        own = own if has_state else sorted(own)
        names += [f"{name} (group {number}, number {index})" for index, name in enumerate(own)]
    values = [parameter for group in optimizer.param_groups for parameter in group["params"]] if has_state else []
    compare_order("broadcast_optimizer_state", names, values)


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, _Placeholder)


def _add_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros; sparse zeros for sparse embeddings and SparseAdam."""
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)] if model else []
    sparse = {module.weight for module in embeddings if module.sparse}
    for parameter in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            is_sparse = parameter in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = zeros.to_sparse() if is_sparse else zeros


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return one worker's object on all workers.

    Args:
        obj: Anything that cloudpickle can pickle, including lambdas. Ignored on workers other than the root.
        root_rank: The sender's global rank, also in a process set.
        name: Matches the operation between workers.
        process_set: The workers that take part.

    Raises:
        ValueError: The root is not in the set.
        HorovodInternalError: The object cannot be pickled (the root raises the original error); also as `broadcast`.
    """
    is_root = engine.get_for_operation().rank_info.rank == root_rank
    payload, error = _to_tensor(obj) if is_root else (_bytes(0), None)
    length = broadcast_(_lengths(payload, error), root_rank, name and f"{name}.length", process_set)
    if length < 0:
        raise error or HorovodInternalError(f"rank {root_rank} cannot pickle its object; see the error of that rank")
    content = broadcast_(
        payload if is_root else _bytes(int(length)), root_rank, name and f"{name}.content", process_set
    )
    return obj if is_root else _from_tensor(content)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return all workers' objects, by rank, on all workers.

    Args:
        obj: Anything that cloudpickle can pickle.
        name: Matches the operation between workers.

    Raises:
        HorovodInternalError: An object cannot be pickled (its rank raises the original error); also as `allgather`.
    """
    payload, error = _to_tensor(obj)
    lengths = allgather(_lengths(payload, error), name and f"{name}.length").tolist()
    if min(lengths) < 0:
        rank = lengths.index(-1)
        raise error or HorovodInternalError(f"rank {rank} cannot pickle its object; see the error of that rank")
    return [_from_tensor(part) for part in allgather(payload, name and f"{name}.content").split(lengths)]


def _to_tensor(obj: Any) -> tuple[Tensor, Exception | None]:
    """Pickle an object to uint8 [bytes]; return an error instead of raising it, so that the peers get it first."""
    try:
        pickled = cloudpickle.dumps(obj)
    except Exception as error:
        return _bytes(0), error
    return torch.frombuffer(bytearray(pickled), dtype=torch.uint8), None


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _lengths(payload: Tensor, error: Exception | None) -> Tensor:
    """Return int64 [1]: the size of a payload in bytes; -1 for an error."""
    return torch.tensor([-1 if error else len(payload)], device="cpu")


def _from_tensor(payload: Tensor) -> Any:
    return cloudpickle.loads(payload.numpy().tobytes())


class CompareReplicas(Collective, kind="compare_replicas"):
    """Compares models by fingerprints, for `hvd.optimizer.replica_watch`. Here, since a joined worker needs it.

    The result is None if they are equal, else the workers that differ by global rank.

    Args:
        replica: This worker's host, fingerprints and processor; None if it has joined.
    """

    joinable = True

    def __init__(
        self, name: str, tensors: Sequence[Tensor] = (), *, replica: Replica | None = None, **options: Any
    ) -> None:
        super().__init__(name, tensors, **options)
        self._replica = replica

    def execute(self, links: SetConnections) -> dict[int, Replica] | None:
        message = json.dumps(self._replica).encode() if self._replica else b""
        digest = blake2b(json.dumps(self._replica[1]).encode(), digest_size=16).digest() if self._replica else b""
        if len({other for other in links.control.exchange_bytes(digest) if other}) <= 1:
            return None
        messages = links.control.exchange_bytes(message)
        return {rank: json.loads(other) for rank, other in zip(links.ranks, messages, strict=True) if other}


def compare_order(user: str, names: Sequence[str], values: Sequence[Tensor] = ()) -> None:
    """Compare the workers' lists of parameters, which they use together.

    Parameters without names, or numbered by the script, are distinguished by their values if these are equal on all
    workers. Values that differ otherwise are not an error: some scripts broadcast them later.

    Args:
        user: What uses the parameters, the same on all workers.
        values: The parameters with these names, or none.

    Raises:
        HorovodInternalError: The names differ.
        ReplicasDifferError: The workers have the same values at different places.
    """
    from lockstep.diagnosis.replicas import fingerprints, is_comparable

    if engine.get_for_operation().settings.check_replicas == 0:
        values = ()
    values = [value if is_comparable(value) else torch.empty(0, device="cpu") for value in values]
    replica = "", [names, fingerprints(values).tolist() if values else []], ""
    request = submit(CompareReplicas, [], f"order.{user}", global_process_set, urgent=True, replica=replica)
    for (rank, (_, mine, _)), (other_rank, (_, theirs, _)) in pairwise((request.wait() or {}).items()):
        ranks = f"ranks {rank} and {other_rank}"
        if text := differing_order(mine[0], theirs[0]):
            raise HorovodInternalError(f"Mismatched {text} ({request.name}, {ranks})")
        if mine[1] != theirs[1] and sorted(mine[1]) == sorted(theirs[1]):
            moved = [name for name, *sums in zip(mine[0], mine[1], theirs[1], strict=True) if sums[0] != sums[1]]
            raise ReplicasDifferError(
                f"{ranks} have their parameters in different orders: equal values at different places of "
                f"{', '.join(moved[:8])}{', ...' * (len(moved) > 8)}. {ORDER}"
            )
