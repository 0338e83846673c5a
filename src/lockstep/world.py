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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import WorldError, first_line
from lockstep.imports import collector_paused
from lockstep.place import SLURM, Place
from lockstep.rendezvous import open_store

if TYPE_CHECKING:
    import numpy as np
    import torch

CONNECT_SECONDS = 600.0  # workers of one job start minutes apart where they load Python from a busy shared file system
VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_connections = itertools.count()


@dataclass(frozen=True)
class World:
    """A connected worker: its place, its device, and the few collectives that a job needs beside gradients.

    With size 1 nothing is communicated and no port is open.
    """

    place: Place
    device: torch.device

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

            dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest value of each element over all workers, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, dist.ReduceOp.MAX)
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
        dist.all_reduce(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(payload)] = payload
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded)
        pairs = zip(rows, lengths.tolist(), strict=True)
        return [json.loads(bytes(row[:length].numpy())) for row, length in pairs]

    def broadcast_(self, values: np.ndarray[Any, Any], source: int) -> None:
        """Give every worker the numbers of rank `source`, in place; all have an array of the same shape and type."""
        if self.size > 1:
            import torch
            import torch.distributed as dist

            dist.broadcast(torch.from_numpy(values), source)

    def union(self, values: Iterable[str]) -> list[str]:
        """What any worker has, sorted, on every worker."""
        return sorted({value for part in self.gather(sorted(values)) for value in part})

    def from_main(self, value: Any) -> Any:
        """Rank 0's value (any JSON), on every worker."""
        return self.gather(value if self.is_main else None)[0]


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextmanager
def connect(
    place: Place,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    backend: Literal["auto", "gloo", "nccl"] = "auto",
) -> Iterator[World]:
    """Connect this worker to its peers, and disconnect it after a good end.

    Collectives of CPU tensors go through Gloo, of CUDA tensors through NCCL, or with backend "gloo" through Gloo too,
    where workers may share a GPU: they take the GPUs in turn.

    Raises:
        WorldError: The device is not there, the backend does not carry its tensors, or the peers cannot be reached.
    """
    with collector_paused():
        import torch
        import torch.distributed as dist

    chosen = _choose_device(place, device, may_share=backend == "gloo")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif backend == "nccl":
        raise WorldError("--dist-backend nccl carries CUDA tensors alone, but this worker is on the CPU; use gloo")
    if place.size == 1 or dist.is_initialized():
        yield World(place, chosen)
        return
    with collector_paused():
        # Imported later, as making an optimizer does, it would keep the process group alive for good.
        import torch._dynamo

    backends = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" and backend != "gloo" else "gloo"
    # Under a name of its own: a later connection must not find the addresses of an earlier one.
    store = dist.PrefixStore(f"connect/{next(_connections)}", open_store(place, CONNECT_SECONDS))
    try:
        dist.init_process_group(backends, store=store, rank=place.rank, world_size=place.size)
    except (RuntimeError, ValueError) as error:
        raise WorldError(
            f"worker {place.rank} on {socket.gethostname()} cannot connect to its {place.size - 1} peers: "
            f"{first_line(error)}; GLOO_SOCKET_IFNAME names the network interface to use"
        ) from error
    world = World(place, chosen)
    if chosen.type == "cuda" and backend != "gloo":
        _check_devices(world)
    yield world
    disconnect()  # not after an error: the process then ends, which is what its peers must see


def disconnect() -> None:
    """Take leave of the peers, who do the same now; without them this could block.

    Models that nothing refers to any more are collected first, for they hold the process group: Gloo's threads must be
    gone before Python ends, or they may abort it.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(place: Place, device: str, may_share: bool = False) -> torch.device:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise WorldError("--device cuda, but torch finds no CUDA device here; `lockstep doctor` says why")
    count = torch.cuda.device_count()
    if count == 1 and _sees_one_device():
        return torch.device("cuda", 0)  # a launcher or a script has given each worker its own
    if place.local_size > count and not may_share:
        raise WorldError(
            f"{place.local_size} workers on {socket.gethostname()}, which has {count} GPU{'s' * (count > 1)}"
            f"{_slurm_hint(place)}; start at most one worker a GPU, or add --device cpu, or --dist-backend gloo, by "
            f"which workers may share a GPU"
        )
    return torch.device("cuda", place.local_rank % count)


def _sees_one_device() -> bool:
    """Whether somebody has chosen a single GPU for this process."""
    chosen = [os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name)]
    return any(len(text.split(",")) == 1 for text in chosen)


def _slurm_hint(place: Place) -> str:
    if place.launcher != SLURM.name:
        return ""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "none")
    return f" to show (SLURM_GPUS_ON_NODE={on_node}; srun --gpus-per-task=1 gives each task one)"


def _check_devices(world: World) -> None:
    """Check that no two workers share a GPU, which NCCL refuses in words that name neither.

    Raises:
        WorldError: They do; the same error on every worker.
    """
    import torch

    # Parts of one GPU (MIG) have names of their own there alone.
    visible = next((os.environ[name] for name in VISIBLE_DEVICES if os.environ.get(name, "").startswith("MIG-")), "")
    device = f"{torch.cuda.get_device_properties(world.device).uuid} {visible}"
    workers: dict[tuple[str, str], list[int]] = {}
    for rank, (host, name) in enumerate(world.gather([socket.gethostname(), device])):
        workers.setdefault((host, name), []).append(rank)
    for (host, name), ranks in workers.items():
        if len(ranks) > 1:
            raise WorldError(
                f"workers {ranks} on {host} share the GPU {name.strip()}: CUDA_VISIBLE_DEVICES is the same for all; "
                f"give each worker its own (Slurm: --gpus-per-task=1), unset it, or add --device cpu, or "
                f"--dist-backend gloo, by which they may share it"
            )
