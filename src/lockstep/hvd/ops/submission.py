"""Submits requests and waits: for their results, and, with `barrier` and `join`, for the other workers.

The arguments of a call are checked here, so that errors are raised at once, on this worker only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.process_sets import ProcessSet, global_process_set
from lockstep.world import accelerator

AnyCollective = TypeVar("AnyCollective", bound=Collective)

_handles: dict[int, Collective] = {}
_handle_numbers = itertools.count()


def submit(
    collective: type[AnyCollective],
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    **details: Any,
) -> AnyCollective:
    """Check the arguments and submit a request to the process set's channel.

    Args:
        details: Further arguments for the collective's constructor.

    Raises:
        AttributeError: An element of `tensors` is not a tensor, or the name is not a string.
        ValueError: A dtype or device is not supported, a tensor cannot be written to, the name is already pending, a
            graph is being captured, or this worker is not in the set.
        TypeError: The set is not registered.
        HorovodInternalError: Horovod is not initialized.
    """
    context = engine.get_for_operation()
    kind = collective.kind
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise AttributeError(f"{kind} expects a torch.Tensor, got {type(tensor).__name__!r}")
        is_carried = tensor.is_cpu or accelerator.overlaps(tensor.device)
        if tensor.dtype not in collective.dtypes or tensor.layout is not torch.strided or not is_carried:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if len(tensors) > 1 and len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"the tensors of a grouped {kind} must be on one device")
    if details.get("in_place"):
        tensors = [_writable(tensor) for tensor in tensors]
    else:
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
    number = process_set.process_set_id
    if number is None:
        raise TypeError(f"{process_set} is not registered; pass it to hvd.init() or hvd.add_process_set()")
    channel = context.channels.get(number)
    if channel is None:
        raise ValueError(
            f"{kind.capitalize()}: Rank {context.rank_info.rank} is not a member of the provided process set."
        )
    if name is None:
        name = f"noname.{context.count(kind, number)}"
    elif not isinstance(name, str):
        raise AttributeError(f"name must be a string, got {name!r}")
    request = collective(name, tensors, **details)
    if tensors and not tensors[0].is_cpu:
        request.follow_stream()
    channel.submit(request)
    return request


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same memory that the communication thread may write to.

    Raises:
        ValueError: Elements share memory, or are stored negated or conjugated.
    """
    overlaps = not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1
    if overlaps or tensor.is_neg() or tensor.is_conj():
        raise ValueError("Tensor is required to be contiguous. An expanded tensor cannot be worked on in place.")
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):  # an inference tensor is only writable in inference mode
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def differentiable(
    run: Callable[[Sequence[torch.Tensor]], Any],
    gradients_of: Callable[[Sequence[torch.Tensor], Sequence[torch.Size]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Return the result of a collective, `run(tensors)`, as an autograd function if a tensor requires a gradient.

    Args:
        gradients_of: Returns the gradients of the tensors, from those of the results and the shapes of the tensors.
    """
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        return _Differentiable.apply(run, gradients_of, *tensors)
    return run(tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], gradients_of: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.gradients_of = gradients_of
        ctx.shapes = [tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return run(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, *ctx.gradients_of(gradients, ctx.shapes)


def handle_of(request: Collective) -> int:
    """Return a handle for the request, valid until `synchronize`."""
    handle = next(_handle_numbers)
    _handles[handle] = request
    return handle


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has finished, so that `synchronize` would not block.

    Raises:
        ValueError: The handle is unknown or has been synchronized.
    """
    request = _handles.get(handle)
    if request is None:
        raise ValueError(f"Handle {handle} was not created or has been cleared.")
    return request.done


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result; None if the handle has been synchronized before.

    Raises:
        HorovodInternalError: The operation failed.
    """
    request = _handles.pop(handle, None)
    if request is None:
        return None
    if not request.finished:
        request.channel.hurry()
    return request.wait()


def forget_finished() -> None:
    """Drop successful requests that were never synchronized, and their tensors."""
    for handle in [handle for handle, request in _handles.items() if request.done and request.error is None]:
        _handles.pop(handle, None)


class Join(Collective, kind="join"):
    """The request that a joined worker waits for. It is passed to `Channel.join`, never to `submit`."""


class Barrier(Collective, kind="barrier"):
    """Finishes when all workers have submitted it or have joined."""

    joinable = True


def join(device: int = -1) -> int:
    """Wait until all workers have joined; until then, take part in their all-reduces with zeros.

    For workers that run out of data. Average still divides by the number of all workers.

    Args:
        device: The index of the GPU for the zeros, if this worker has not reduced a GPU tensor yet; -1 for the
            current GPU. Otherwise the zeros are on the device of its earlier tensors.

    Returns:
        The rank that joined last, the same on all workers.

    Raises:
        HorovodInternalError: A worker disconnected, or Horovod is not initialized.
    """
    request = Join("all")
    context = engine.get_for_operation()
    own = accelerator.current()
    context.channels[0].join(request, torch.device(own.type, device) if device >= 0 and own.type != "cpu" else own)
    last: int = request.wait()
    context.restart_counts()
    context.joins += 1
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers of the set have called this.

    Raises:
        HorovodInternalError, ValueError, TypeError: As `allreduce`.
    """
    submit(Barrier, [], None, process_set, urgent=True).wait()
