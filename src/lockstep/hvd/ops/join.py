"""Join and barrier: wait for the other workers."""

from __future__ import annotations

import torch

from lockstep.hvd.engine import current
from lockstep.hvd.engine.request import Collective
from lockstep.hvd.ops.submission import submit
from lockstep.hvd.process_sets import ProcessSet, global_process_set
from lockstep.world import accelerator


class Join(Collective, kind="join"):
    """The request that a joined worker waits for. It is passed to `Channel.join`, never to `submit`."""

    __slots__ = ()


class Barrier(Collective, kind="barrier"):
    """Finishes when all workers have submitted it or have joined."""

    __slots__ = ()
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
    context = current.get_for_operation()
    context.channels[0].join(request, _own_device(device))
    last: int = request.wait()
    context.restart_counts(0)
    context.joins += 1
    return last


def _own_device(number: int) -> torch.device:
    own = accelerator.current()
    return torch.device(own.type, number) if number >= 0 and own.type != "cpu" else own


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all workers of the set have called this.

    Raises:
        HorovodInternalError, ValueError, TypeError: As `allreduce`.
    """
    submit(Barrier, [], None, process_set, urgent=True).wait()
