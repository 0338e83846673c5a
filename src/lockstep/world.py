"""The world: who this worker is, on which device, and the connection to its peers.

The only module that creates and destroys the process group; `lockstep.place` reads RANK and its like. torch is imported
when a worker connects, not before, so that the command line can ask for its place at once.
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

from lockstep import accelerator
from lockstep.errors import LostPeerError, StoppedError, WorldError, first_line
from lockstep.imports import collector_paused
from lockstep.loss_watch import LossWatch, print_error
from lockstep.place import SLURM, Place
from lockstep.rendezvous import open_store

if TYPE_CHECKING:
    import numpy as np
    import torch

CONNECT_SECONDS = 600.0  # workers of one job start minutes apart where they load Python from a busy shared file system
PEERS_SECONDS = 1800.0  # for a collective, as docs/howto/when-a-job-hangs.md says
GLOO = "gloo"
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
    device: accelerator.Choice = "auto",
    backend: accelerator.Backend = "auto",
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

    chosen = _choose_device(place, device, may_share=backend == "gloo")
    library = _choose_library(chosen, backend)
    accelerator.use(chosen)
    if place.size == 1 or dist.is_initialized():
        yield World(place, chosen, _host_group() if place.size > 1 else None)
        return
    with collector_paused():
        # Imported later, as making an optimizer does, it would keep the process group alive for good.
        import torch._dynamo  # noqa: F401

    # Under a name of its own: a later connection must not find the addresses of an earlier one.
    store = dist.PrefixStore(f"connect/{next(_connections)}", open_store(place, CONNECT_SECONDS))
    # Before the group is made, which would choose a device itself and fail in words of its own.
    if device != "cpu":
        _check_devices(place, chosen, library, store)
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
        _watches.append(LossWatch(place, store, CONNECT_SECONDS, tell))
    try:
        yield World(place, chosen)
    except StoppedError:
        raise  # all workers stop
    except Exception:
        if library != GLOO:
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


def _choose_device(place: Place, device: str, may_share: bool = False) -> torch.device:
    import torch

    found = accelerator.kind() if device != "cpu" else None
    if device == "cpu" or (device == "auto" and (found is None or (found in accelerator.ALONE and place.size > 1))):
        return torch.device("cpu")
    if found is None or device not in ("auto", "gpu", found):
        wanted = "accelerator" if device == "gpu" else f"{device.upper()} device"
        raise WorldError(f"--device {device}, but torch finds no {wanted} here; `lockstep doctor` says why")
    if found in accelerator.ALONE and place.size > 1:
        raise WorldError(f"--device {found} is for a single worker; use -np 1, or --device cpu")
    count = accelerator.count()
    if count == 1 and _sees_one_device():
        return torch.device(found, 0)  # a launcher or a script has given each worker its own
    if place.local_size > count and not may_share:
        raise WorldError(
            f"{place.local_size} workers on {socket.gethostname()}, which has {count} GPU{'s' * (count > 1)}"
            f"{_slurm_hint(place)}; start at most one worker a GPU, or add --device cpu, or --dist-backend gloo, by "
            f"which workers may share a GPU"
        )
    return torch.device(found, place.local_rank % count)


def _choose_library(device: torch.device, backend: str) -> str:
    """What carries the device's tensors."""
    own = GLOO if device.type in ("cpu", *accelerator.ALONE) else accelerator.backend(device.type)
    if backend not in ("auto", GLOO, own):
        raise WorldError(
            f"--dist-backend {backend} does not carry tensors on {device.type}, where this worker's are; use "
            f"{own}, or leave it out"
        )
    return own if backend == "auto" else backend


def _sees_one_device() -> bool:
    """Whether somebody has chosen a single GPU for this process."""
    chosen = [os.environ[name] for name in accelerator.VISIBLE if os.environ.get(name)]
    return any(len(text.split(",")) == 1 for text in chosen)


def _slurm_hint(place: Place) -> str:
    if place.launcher != SLURM.name:
        return ""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "none")
    return f" to show (SLURM_GPUS_ON_NODE={on_node}; srun --gpus-per-node=N --gpu-bind=none shows all to each task)"


def _check_devices(place: Place, device: torch.device, library: str, store: Any) -> None:
    """Check that all workers have a device of one kind, and none that another has, which only Gloo allows.

    Raises:
        WorldError: They do not; the same error on every worker.
    """
    own = accelerator.identity(device) if device.type != "cpu" else ""
    store.set(f"device/{place.rank}", json.dumps([socket.gethostname(), device.type, own]))
    told = [json.loads(said) for said in store.multi_get([f"device/{rank}" for rank in range(place.size)])]
    ranks_of: dict[str, list[int]] = {}
    workers: dict[tuple[str, str], list[int]] = {}
    for rank, (host, kind, identity) in enumerate(told):
        ranks_of.setdefault(kind, []).append(rank)
        workers.setdefault((host, identity), []).append(rank)
    if len(ranks_of) > 1:
        kinds = ", ".join(f"{kind} for workers {ranks} ({told[ranks[0]][0]})" for kind, ranks in ranks_of.items())
        raise WorldError(
            f"the workers' devices differ: {kinds}; `lockstep doctor` there says why, and --device cpu is for all"
        )
    for (host, identity), ranks in workers.items():
        if len(ranks) > 1 and library != GLOO and not accelerator.may_be_shared():
            raise WorldError(
                f"workers {ranks} on {host} share the GPU {identity}: CUDA_VISIBLE_DEVICES or its like is the same for "
                f"all; give each worker its own, unset it (Slurm: --gpus-per-node=N --gpu-bind=none), or add --device "
                f"cpu, or --dist-backend gloo, by which they may share it"
            )
