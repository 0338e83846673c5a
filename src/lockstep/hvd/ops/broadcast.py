"""Broadcast: every worker gets one worker's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.hvd.engine import context as engine
from lockstep.hvd.engine.request import AVERAGE, Collective
from lockstep.hvd.engine.transfers import SetConnections
from lockstep.hvd.ops.allreduce import allreduce
from lockstep.hvd.ops.submission import differentiable, handle_of, submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set

Tensor = torch.Tensor


class Broadcast(Collective, kind="broadcast"):
    """Sends one worker's tensor to all.

    Args:
        root: The sender's global rank.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor], root: int, **options: Any) -> None:
        self.root = int(root)  # 2, 2.0 and NumPy's 2 must have the same signature
        super().__init__(name, tensors, (self.root,), **options)

    def execute(self, links: SetConnections) -> Tensor:
        root = links.ranks.index(self.root)
        tensor = self.tensors[0]
        in_place = self.in_place and tensor.is_contiguous()
        output = tensor if in_place else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if links.rank == root and not in_place:
            output.copy_(tensor)
        links.transfers.broadcast(output, root)
        return tensor.copy_(output) if self.in_place and not in_place else output

    @classmethod
    def difference(cls, terms: Sequence[Any], others: Sequence[Any]) -> str:
        (mine,), (theirs,) = terms, others
        if mine == theirs:
            return ""
        return (
            f"BROADCAST root ranks: One rank specified root rank {mine}, but another rank specified root rank {theirs}."
        )


def _submit(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, **options: bool) -> Broadcast:
    engine.get_for_operation()
    if process_set.process_set_id is not None and root_rank not in (process_set.ranks or ()):
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    return submit(Broadcast, [tensor], name, process_set, root=root_rank, **options)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Send one worker's tensor to all. Differentiable: the root's gradient is the average of all workers' gradients.

    Args:
        tensor: The same shape and dtype on all workers.
        root_rank: The sender's global rank, also in a process set.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: The root is not in the set; also as `allreduce`.
        HorovodInternalError, TypeError, AttributeError: As `allreduce`.
    """

    def gradients_of(gradients: Sequence[Tensor], _: object) -> Sequence[Tensor]:
        reduced = allreduce(gradients[0], op=AVERAGE, process_set=process_set)
        is_root = process_set.rank() == (process_set.ranks or []).index(root_rank)
        return [reduced if is_root else torch.zeros_like(reduced)]

    def run(tensors: Sequence[Tensor]) -> Any:
        return _submit(tensors[0], root_rank, name, process_set, urgent=True).wait()

    result: Tensor = differentiable(run, gradients_of, [tensor])
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast`, not differentiable; return a handle."""
    return handle_of(_submit(tensor, root_rank, name, process_set))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Run `broadcast` in place, not differentiable; return the tensor itself."""
    result: Tensor = _submit(tensor, root_rank, name, process_set, in_place=True, urgent=True).wait()
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a `broadcast_`; return a handle."""
    return handle_of(_submit(tensor, root_rank, name, process_set, in_place=True))
