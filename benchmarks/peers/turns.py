"""The contestant's side of `benchmarks/contestants.py`: run a turn on request, in all workers at once.

Needs only torch, so that every peer's environment can import it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

ADDRESS = "LOCKSTEP_BENCHMARK_SOCKET"


def take_turns(turn: Callable[[], int]) -> None:
    """Call `turn`, which returns this worker's units of work, until the harness closes the connection.

    Every worker must call this; with several workers, after torch.distributed is initialized.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        for reply in _requests():
            _broadcast(1)
            reply(_summed(turn()))
        _broadcast(0)
    else:
        while _broadcast(0):
            _summed(turn())


def _requests() -> Iterator[Callable[[int], None]]:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[ADDRESS])
        while link.recv(1):
            yield lambda units: link.sendall(f"{units}\n".encode())


def _broadcast(more: int) -> int:
    """Return rank 0's value on every worker."""
    value = torch.tensor([more])
    if dist.is_initialized():
        dist.broadcast(value, 0)
    return int(value)


def _summed(units: int) -> int:
    """Return the sum over all workers; returns when the last worker has finished its turn."""
    total = torch.tensor([units])
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)
