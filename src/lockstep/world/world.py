"""The world: who this worker is, on which device, and the connection to its peers.

The only module that creates and destroys the process group; `lockstep.world.launcher_environment` reads RANK and its
like. torch is imported when a worker connects, not before, so that the command line can ask for its place at once.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.config.device_choice import BackendChoice, DeviceChoice
from lockstep.errors import LostPeerError, StoppedError, WorldError, first_line
from lockstep.imports import collector_paused
from lockstep.world import accelerator
from lockstep.world.devices import GLOO, check_devices, choose_device, choose_library
from lockstep.world.launcher_environment import Place
from lockstep.world.peer_loss import LossWatch, print_error
from lockstep.world.rendezvous import open_store
from lockstep.world.start_limit import WORKERS_SECONDS, start_limit

if TYPE_CHECKING:
    import numpy as np
    import torch

PEERS_SECONDS = 1800.0  # for a collective, as docs/howto/when-a-job-hangs.md says
ABORT_SECONDS = 3.0
_connections = itertools.count()
_watches: list[LossWatch] = []  # that of the connection, if it has one


@dataclass(frozen=True)
class World:
    """A connected worker: its place, its device, and the few collectives that a job needs beside gradients.

    With size 1 nothing is communicated and no port is open.
    """

    place: Place
    device: torch.device
    host_group: Any = None
    """What carries tensors on the CPU: torch's process group for them, or None for the default one."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that writes what is written once."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over all workers, in place; every worker gets the same bits."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self._group_for(tensor))
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest value of each element over all workers, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group_for(tensor))
        return tensor

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker. Values travel as JSON; no pickle is read."""
        if self.size == 1:
            return [value]
        import torch
        import torch.distributed as dist

        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(payload)
        dist.all_reduce(lengths, group=self.host_group)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(payload)] = payload
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, self.host_group)
        pairs = zip(rows, lengths.tolist(), strict=True)
        return [json.loads(bytes(row[:length].numpy())) for row, length in pairs]

    def broadcast_(self, values: np.ndarray[Any, Any], source: int) -> None:
        """Give every worker the numbers of rank `source`, in place; all have an array of the same shape and type."""
        if self.size > 1:
            import torch
            import torch.distributed as dist

            dist.broadcast(torch.from_numpy(values), source, self.host_group)

    def union(self, values: Iterable[str]) -> list[str]:
        """What any worker has, sorted, on every worker."""
        return sorted({value for part in self.gather(sorted(values)) for value in part})

    def from_main(self, value: Any) -> Any:
        """Rank 0's value (any JSON), on every worker."""
        return self.gather(value if self.is_main else None)[0]

    def _group_for(self, tensor: torch.Tensor) -> Any:
        return self.host_group if tensor.is_cpu else None


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def connect(
    place: Place,
    device: DeviceChoice = "auto",
    backend: BackendChoice = "auto",
    tell: Callable[[LostPeerError], int] = print_error,
) -> Iterator[World]:
    """Connect this worker to its peers, and disconnect it after a good end.

    Collectives of CPU tensors go through Gloo, those of the accelerator's through its own library (NCCL, XCCL), or with
    backend "gloo" through Gloo too, where workers may share a device: they take the devices in turn. A process group
    that the script has made is used as it is.

    A worker whose accelerator waits for one that is lost ends within seconds, with the exit code that `tell` returns.

    Raises:
        WorldError: The device is not there, the backend does not carry its tensors, workers share a device or have
            none, or the peers cannot be reached.
    """
    with collector_paused():
        import torch.distributed as dist

    chosen = choose_device(place, device, may_share=backend == "gloo")
    library = choose_library(chosen, backend)
    accelerator.use(chosen)
    if place.size == 1 or dist.is_initialized():
        yield World(place, chosen, _host_group() if place.size > 1 else None)
        return
    with collector_paused():
        # Imported later, as making an optimizer does, it would keep the process group alive for good.
        import torch._dynamo  # noqa: F401

    # Under a name of its own: a later connection must not find the addresses of an earlier one.
    seconds = start_limit() or WORKERS_SECONDS
    store = dist.PrefixStore(f"connect/{next(_connections)}", open_store(place, seconds))
    # Before the group is made, which would choose a device itself and fail in words of its own.
    if device != "cpu":
        check_devices(place, chosen, library, store)
    own_library: dict[str, Any] = {"backend": f"cpu:gloo,{chosen.type}:{library}", "device_id": chosen}
    try:
        dist.init_process_group(
            **(own_library if library != GLOO else {"backend": GLOO}),
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=PEERS_SECONDS),
        )
    except (RuntimeError, ValueError) as error:
        more = f", {tells_more} more" if (tells_more := accelerator.TELLS_MORE.get(library)) else ""
        raise WorldError(
            f"worker {place.rank} on {socket.gethostname()} cannot connect to its {place.size - 1} peers: "
            f"{first_line(error)}; GLOO_SOCKET_IFNAME names the network interface to use{more}"
        ) from error
    if library != GLOO:
        _watches.append(LossWatch(place, store, seconds, tell))
    try:
        yield World(place, chosen)
    except BaseException as error:
        for watch in _watches:
            watch.stand_down()
        if library != GLOO and isinstance(error, Exception) and not isinstance(error, StoppedError):  # which all raise
            abort()
        raise
    disconnect()  # not after an error: the process then ends, which is what its peers must see


def disconnect() -> None:
    """Take leave of the peers, who do the same now; without them this could block.

    Models that nothing refers to any more are collected first, for they hold the process group: Gloo's threads must be
    gone before Python ends, or they may abort it.
    """
    import torch.distributed as dist

    while _watches:
        _watches.pop().close()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Let go of the accelerator's collectives, which would hold up this process's end: it has failed."""
    import torch.distributed as dist

    work = threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
    work.start()
    work.join(ABORT_SECONDS)


def _host_group() -> Any:
    """What carries CPU tensors where the script has made the process group: all workers call this."""
    import torch
    import torch.distributed as dist

    try:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:  # such as init_process_group("nccl")
        return dist.new_group(backend=GLOO)
    return None
