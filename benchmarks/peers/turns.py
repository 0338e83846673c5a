"""The contestant's side of `benchmarks/contestants.py`: take a turn, in all workers at once, whenever it is asked for.

Needs nothing but torch, so that every peer's environment can import it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

ADDRESS = "LOCKSTEP_BENCHMARK_SOCKET"


def take_turns(turn: Callable[[], int]) -> None:
    """Call `turn`, which returns the units of work that this worker did, until the harness hangs up.

    Every worker calls this, after torch.distributed was initialised where there are several.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        for answer in _questions():
            _tell(1)
            answer(_summed(turn()))
        _tell(0)
    else:
        while _tell(0):
            _summed(turn())


def _questions() -> Iterator[Callable[[int], None]]:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[ADDRESS])
        while link.recv(1):
            yield lambda units: link.sendall(f"{units}\n".encode())


def _tell(more: int) -> int:
    """Rank 0's word, in every worker."""
    word = torch.tensor([more])
    if dist.is_initialized():
        dist.broadcast(word, 0)
    return int(word)


def _summed(units: int) -> int:
    """Over all workers; it ends when the last has ended its turn."""
    total = torch.tensor([units])
    if dist.is_initialized():
        dist.all_reduce(total)
    return int(total)
