"""The world: this worker's rank and device, and the connection to its peers.

This is the only module that creates and destroys the process group; `lockstep.world.launcher_environment` reads RANK
and similar. torch is imported only when a worker connects, so that the command line can read its rank quickly.
"""

from __future__ import annotations

import gc
import itertools
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep import errors
from lockstep.config.schema import BackendChoice, DeviceChoice
from lockstep.diagnosis import publisher
from lockstep.diagnosis.group_watch import GroupWatch, watched_by_launcher
from lockstep.diagnosis.idle_clock import hang_limit
from lockstep.diagnosis.spawned_workers import refuse_copy
from lockstep.errors import LockstepError, StoppedError, WorldError, first_line
from lockstep.imports import collector_paused
from lockstep.world import accelerator
from lockstep.world.devices import GLOO, check_devices, choose_device, choose_library
from lockstep.world.generations import connections, is_interruption, stays
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.peer_loss import GroupAbort, LossWatch, Report, end_process, print_error
from lockstep.world.rendezvous import WORKERS_SECONDS, open_store, start_limit

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import Store

PEERS_SECONDS = 1800.0  # timeout of a collective; see docs/howto/when-a-job-hangs.md
# By generation: how many times this process has connected in it.
_connections: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
_watches: list[LossWatch | GroupWatch] = []  # of the current connection


@dataclass(frozen=True)
class World:
    """A connected worker: its rank info, its device, and the few collectives that a job needs besides gradients.

    With size 1, it does not communicate and opens no port.
    """

    rank_info: RankInfo
    device: torch.device
    host_group: Any = None
    """torch's process group for tensors on the CPU, or None for the default one."""

    @property
    def rank(self) -> int:
        return self.rank_info.rank

    @property
    def size(self) -> int:
        return self.rank_info.size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files and output shared by all workers."""
        return self.rank == 0

    def store(self) -> Store:
        """Return the job's key-value store, which threads may use, for calls that do not wait for others."""
        import torch.distributed as dist

        return dist.distributed_c10d._get_default_store()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all workers, in place. Every worker gets the same bits."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.group_for(tensor))
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum over all workers, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group_for(tensor))
        return tensor

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return every worker's row [F], on the CPU, as [workers, F]."""
        if self.size == 1:
            return row.unsqueeze(0)
        import torch
        import torch.distributed as dist

        rows = [torch.empty_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row, self.group_for(row))
        return torch.stack(rows)

    def barrier(self) -> None:
        """Wait until every worker calls this."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Return every worker's value, by rank, on every worker. Values are sent as JSON; nothing is unpickled."""
        if self.size == 1:
            return [value]
        import torch

        payload = json.dumps(value).encode()
        padded = payload.ljust(self.highest(len(payload)), b"\0")
        rows = self.rows(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [json.loads(bytes(row.numpy()).rstrip(b"\0")) for row in rows]

    def highest(self, number: int) -> int:
        """Return the maximum of a number over the workers."""
        import torch

        return int(self.max_(torch.tensor([number], device="cpu")))

    def broadcast_(self, values: np.ndarray[Any, Any], source: int) -> None:
        """Copy rank `source`'s array to every worker, in place. All arrays have the same shape and dtype."""
        if self.size > 1:
            import torch
            import torch.distributed as dist

            tensor = torch.from_numpy(values)
            dist.broadcast(tensor, source, self.group_for(tensor))

    def union(self, values: Iterable[str]) -> list[str]:
        """Return the union of all workers' values, sorted, on every worker."""
        return sorted({value for part in self.gather(sorted(values)) for value in part})

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value (any JSON) on every worker."""
        return self.gather(value if self.is_main else None)[0]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Return on every worker what rank 0's `work` returns (any JSON), or raise its LockstepError there."""
        value, failure, kind = None, "", ""
        if self.is_main:
            try:
                value = work()
            except LockstepError as error:
                failure, kind = str(error), type(error).__name__
        value, failure, kind = self.from_main([value, failure, kind])
        if kind:
            raise getattr(errors, kind, LockstepError)(failure)
        return value

    def group_for(self, tensor: torch.Tensor) -> Any:
        """Return torch's process group for a tensor's device; None for the default one."""
        return self.host_group if tensor.is_cpu else None


@contextmanager
def connect(
    rank_info: RankInfo,
    device: DeviceChoice = "auto",
    backend: BackendChoice = "auto",
    report: Report = print_error,
) -> Iterator[World]:
    """Connect this worker to its peers, and disconnect it at the end of the block, unless the block raises.

    Collectives of CPU tensors use Gloo; those of accelerator tensors use the accelerator's library (NCCL, XCCL). With
    backend "gloo" both use Gloo, and workers may share devices, which are assigned in turn. A process group that the
    script has created is used as it is.

    A worker whose accelerator waits for a dead peer exits within seconds, with the exit code that `report` returns.

    Raises:
        WorldError: The device is missing, the backend does not support its tensors, workers share a device or have
            none, or the peers cannot be reached.
        ConfigError: A process that the script has started runs the script again.
    """
    with collector_paused():
        import torch.distributed as dist

    if rank_info.size > 1:
        refuse_copy()
    publisher.start()
    chosen = choose_device(rank_info, device, may_share=backend == "gloo")
    library = choose_library(chosen, backend)
    accelerator.use(chosen)
    if rank_info.size == 1 or dist.is_initialized():
        connections.abort = GroupAbort(chosen) if dist.is_initialized() and library != GLOO else None
        yield World(rank_info, chosen, _host_group() if rank_info.size > 1 else None)
        return
    with collector_paused():
        # Creating an optimizer imports this; imported after the process group, it would keep the group alive.
        import torch._dynamo  # noqa: F401

    with connections.connecting():
        # Each connection has its own prefix, so that it does not find the addresses of an earlier one.
        seconds = start_limit() or WORKERS_SECONDS
        store = dist.PrefixStore(f"connect/{next(_connections[rank_info.restart])}", open_store(rank_info, seconds))
        # Before the group is created, which would choose a device itself and fail with an unclear message.
        if device != "cpu":
            with publisher.joining():
                check_devices(rank_info, chosen, library, store)
        timeout = timedelta(seconds=PEERS_SECONDS)
        aborts = library != GLOO and stays()
        own_library: dict[str, Any] = {"backend": f"cpu:gloo,{chosen.type}:{library}", "device_id": chosen}
        own_library["pg_options"] = accelerator.group_options(library, timeout)
        try:
            with connections.noting(), accelerator.without_error_handling() if aborts else nullcontext():
                dist.init_process_group(
                    **(own_library if library != GLOO else {"backend": GLOO}),
                    store=store,
                    rank=rank_info.rank,
                    world_size=rank_info.size,
                    timeout=timeout,
                )
        except (RuntimeError, ValueError) as error:
            is_of_device = library != GLOO and "ccl" in str(error).lower()  # NCCL, RCCL or oneCCL, else Gloo
            debug = accelerator.DEBUG_VARIABLES.get(library)
            hints = [] if is_of_device else ["GLOO_SOCKET_IFNAME sets the network interface"]
            hints += [f"{debug} prints more"] if debug else []
            raise WorldError(
                f"worker {rank_info.rank} on {socket.gethostname()} cannot connect to its {rank_info.size - 1} peers: "
                f"{'; '.join([first_line(error), *hints])}"
            ) from error
    if library != GLOO:
        connections.abort = GroupAbort(chosen)
        _watches.append(LossWatch(rank_info, store, seconds, report, connections.abort_after_loss if aborts else None))
    if hang_limit() and not watched_by_launcher() and not publisher.own_board():
        _watches.append(GroupWatch(store, rank_info.rank, rank_info.size, partial(end_process, report=report)))
    try:
        yield World(rank_info, chosen)
    except BaseException as error:
        for watch in _watches:
            watch.disarm()  # the process exits
        if connections.abort and isinstance(error, Exception) and not isinstance(error, StoppedError):  # on all workers
            connections.abort()
        if isinstance(error, Exception) and is_interruption(error):  # this process stays
            while _watches:
                _watches.pop().close()
        elif connections.abort and connections.abort.has_begun:
            connections.abort.drop_groups()
        raise
    disconnect()  # not after an error: the process then exits, and its peers must notice that


def disconnect() -> None:
    """Destroy the process group (collective: without the peers this could block).

    Unreferenced models are collected first, because they hold the process group: Gloo's threads must end before Python
    does, or they may abort the process.
    """
    while _watches:
        _watches.pop().close()
    gc.collect()
    connections.leave_groups()


def _host_group() -> Any:
    """Return the group for CPU tensors if the script has created the process group (collective)."""
    import torch
    import torch.distributed as dist

    group = dist.distributed_c10d._get_default_group()
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # such as init_process_group("nccl")
        bound = group.bound_device_id  # for which torch wants a backend in each further group
        return dist.new_group(backend=f"cpu:{GLOO},{bound.type}:{GLOO}" if bound else GLOO)
    return None
