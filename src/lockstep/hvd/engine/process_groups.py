"""Gloo process groups outside torch.distributed's registry, which is left to the script."""

from __future__ import annotations

import socket
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from lockstep.errors import WorldError, first_line
from lockstep.world.interfaces import own_address


def gloo_group(store: dist.Store, rank: int, size: int, timeout_seconds: float, one_host: bool) -> Any:
    """Connect `size` workers (collective).

    Args:
        store: The same on all workers.
        one_host: Whether all workers of the job are on this host; then only loopback is used.

    Raises:
        WorldError: A peer cannot be reached within the timeout.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    try:
        options._devices = [_gloo_device(own_address(one_host))]
        group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        # To a worker, it is connected once its peer's system has accepted; the peer itself may see that only later, and
        # would fail if this worker disconnected at once.
        group.barrier().wait()
        return group
    except (RuntimeError, OSError) as error:
        raise WorldError(
            f"worker {rank} on {socket.gethostname()} cannot connect to its peers: {first_line(error)}; "
            f"to choose the network interface, set GLOO_SOCKET_IFNAME"
        ) from error


@cache  # each device starts a thread
def _gloo_device(address: str) -> Any:
    return dist.ProcessGroupGloo.create_device(hostname=address)
