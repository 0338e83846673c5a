"""Join and barrier: waiting for the other workers."""

from __future__ import annotations

import torch

from lockstep.hvd.engine import current
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set
from lockstep.world import accelerator


class Join(Collective, kind="join"):
    """What a worker that has joined waits for; the others have no such request."""

    __slots__ = ()


class Barrier(Collective, kind="barrier"):
    """Done once all workers have asked for it, or have joined."""

    __slots__ = ()
    joinable = True


def join(device: int = -1) -> int:
    """Wait until all workers have joined; until then, go along with their all-reduces by tensors of zeros.

    For workers that have run out of data. Average still divides by the number of all workers.

    Args:
        device: The number of the GPU for the zeros where the others reduce tensors on GPUs and this worker has had none
            yet; -1 for the current one. A worker that has had some uses their device.

    Returns:
        The rank that joined last, the same on all workers.

    Raises:
        HorovodInternalError: A worker is lost, or Horovod is not running.
    """
    request = Join("all")
    context = current.get_for_operation()
    context.channels[0].join(request, _own_device(device))
    last: int = request.wait()
    context.restart_counts(0)
    return last


def _own_device(number: int) -> torch.device:
    own = accelerator.current()
    return torch.device(own.type, number) if number >= 0 and own.type != "cpu" else own


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers of the set are here.

    Raises:
        HorovodInternalError, ValueError, TypeError: As `allreduce`.
    """
    submit(Barrier, [], None, process_set, urgent=True).wait()
