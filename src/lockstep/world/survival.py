"""Work that survives the loss of other workers: it begins again in the same process, with the workers that are left.

The process keeps what is expensive to make: the interpreter, its modules, the device's context, compiled code. What the
work itself has made is dropped, because it refers to a process group that has lost a member.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from lockstep.errors import LostPeerError, WorldError
from lockstep.world import generations

T = TypeVar("T")
on_loss: list[Callable[[Exception], None]] = []
"""Called when the work is interrupted, before its objects are dropped, with the exception that has interrupted it."""


def survive(work: Callable[[], T]) -> T:
    """Do some work in a job of several workers, and return its result; begin again if another worker is lost.

    The work connects to the other workers, for example by `lockstep.connect`, and is the same on all of them. If the
    launcher can replace a lost worker (`--max-restarts`), the others leave the work by an exception, drop all that it
    has made, and begin it again together with the new one. A run that the work opens continues after its last complete
    step. Without such a launcher, or on accelerators, this only calls `work`.

    Args:
        work: A function without arguments, which makes the model, the optimizer and the loaders anew.

    Raises:
        Exception: Any exception of the work that no lost worker has caused.
    """
    generations.stay()
    while True:
        try:
            return work()
        except Exception as error:
            if not is_interruption(error):
                raise
            for each in on_loss:
                each(error)
        # Outside of the handler, where nothing refers to the interrupted work and its process group any more.
        _leave()
        generations.join_next()


def is_interruption(error: Exception) -> bool:
    """Whether an exception of the work comes from the loss of another worker, or a change of the hosts."""
    import torch.distributed as dist

    if isinstance(error, generations.HostsChangedError):
        return True
    if not isinstance(error, RuntimeError | LostPeerError | WorldError):
        return False
    # A group of an accelerator may still wait for the lost member.
    can_leave = not dist.is_initialized() or dist.get_backend() == dist.Backend.GLOO
    return can_leave and generations.is_over()


def _leave() -> None:
    import torch.distributed as dist

    gc.collect()  # whatever still holds the group would keep its connections open, and peers would wait for this worker
    if dist.is_initialized():
        dist.destroy_process_group()
