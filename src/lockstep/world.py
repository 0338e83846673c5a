"""The world: who this worker is, on which device, and the connection to its peers.

The only module that reads RANK and its like, and the only one that creates and destroys the process group. Variables
as torchrun documents them (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables). torch is
imported when a worker connects, not before, so that the command line can ask for its place at once.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import WorldError, first_line

if TYPE_CHECKING:
    import torch

# The variables that launchers give every worker, in the order of `Place`'s fields.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# Where rank 0 is, and what marks torchrun's own workers.
TORCHRUN_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN_ID = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Place:
    """A worker's place among its peers.

    `rank` of `size` workers in all; `local_rank` of `local_size` on this node; `node` counts the nodes from 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    launcher: str = "none"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place:
        """Read this worker's place from the variables of the launcher that started it.

        Raises:
            WorldError: The variables are incomplete or contradict each other.
        """
        if TORCHRUN_ID not in environment and "RANK" not in environment:
            launcher = next((name for name, variables in MPI.items() if variables[0] in environment), None)
            return cls._from_mpi(launcher, environment) if launcher else cls()
        present = [name for name in (TORCHRUN_ID, *TORCHRUN, *TORCHRUN_ADDRESS) if name in environment]
        missing = [name for name in TORCHRUN + TORCHRUN_ADDRESS if name not in environment]
        if missing:
            raise WorldError(
                f"torchrun's variables are incomplete: {', '.join(present)} set, {', '.join(missing)} not set; start "
                f"the job with torchrun or `lockstep train -np N`, or unset what an earlier job left behind: "
                f"unset {' '.join(present)}"
            )
        return cls._checked("torchrun", TORCHRUN, environment)

    @classmethod
    def _from_mpi(cls, launcher: str, environment: Mapping[str, str]) -> Place:
        variables = MPI[launcher]
        if missing := [name for name in variables if name not in environment]:
            raise WorldError(f"{launcher}'s variables are incomplete: {variables[0]} set, {', '.join(missing)} not set")
        return cls._checked(launcher, variables, environment)

    @classmethod
    def _checked(cls, launcher: str, variables: tuple[str, ...], environment: Mapping[str, str]) -> Place:
        """The place that `variables` say; where they do not number the node, nodes are taken to be filled in turn."""
        try:
            rank, size, local_rank, local_size, *node = (int(environment[name]) for name in variables)
        except ValueError:
            shown = ", ".join(f"{name}={environment[name]!r}" for name in variables)
            raise WorldError(f"{launcher}'s variables must be whole numbers: {shown}") from None
        consistent = 0 <= rank < size and 0 <= local_rank < local_size <= size and local_rank <= rank
        if not consistent or (node and node[0] < 0):
            shown = ", ".join(f"{name}={environment[name]}" for name in variables)
            raise WorldError(f"{launcher}'s variables contradict each other: {shown}")
        return cls(rank, size, local_rank, local_size, node[0] if node else rank // local_size, launcher)


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
def connect(place: Place, device: Literal["auto", "cpu", "cuda"] = "auto") -> Iterator[World]:
    """Connect this worker to its peers, and disconnect it after a good end.

    Collectives of CPU tensors go through Gloo, of CUDA tensors through NCCL.

    Raises:
        WorldError: The device is not there, or the peers cannot be reached.
    """
    import torch
    import torch.distributed as dist

    chosen = _choose_device(place, device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if place.size == 1 or dist.is_initialized():
        yield World(place, chosen)
        return
    import torch._dynamo  # Imported later, as making an optimizer does, it would keep the process group alive for good.

    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=place.rank, world_size=place.size)
    except (RuntimeError, ValueError) as error:
        address = ":".join(os.environ.get(name, "?") for name in TORCHRUN_ADDRESS)
        raise WorldError(
            f"worker {place.rank} on {socket.gethostname()} cannot join its {place.size - 1} peers at {address}: "
            f"{first_line(error)}"
        ) from error
    yield World(place, chosen)
    # Not after an error: the process then ends, which is what its peers must see; an orderly goodbye could block.
    gc.collect()  # Models that still hold the group: Gloo's threads must be gone before Python ends, or they abort it.
    dist.destroy_process_group()


def _choose_device(place: Place, device: str) -> torch.device:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise WorldError("--device cuda, but torch finds no CUDA device here; `lockstep doctor` says why")
    if place.local_size > torch.cuda.device_count():
        raise WorldError(
            f"{place.local_size} workers on {socket.gethostname()}, which has {torch.cuda.device_count()} GPUs; "
            f"start at most one worker a GPU, or add --device cpu"
        )
    return torch.device("cuda", place.local_rank)
