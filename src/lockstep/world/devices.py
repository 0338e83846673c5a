"""Which device a worker computes on, and whether those of all workers go together."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

from lockstep.errors import WorldError
from lockstep.world import accelerator
from lockstep.world.launcher_environment import SLURM, Place

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

GLOO = "gloo"


def choose_device(place: Place, device: str, may_share: bool = False) -> torch.device:
    """The device that a worker computes on: its own number's on its host, or the only one that it is shown.

    Raises:
        WorldError: There is none of that kind, or fewer than workers, where these may not share.
    """
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


def choose_library(device: torch.device, backend: str) -> str:
    """What carries the device's tensors: the backend, or for "auto" the device's own library.

    Raises:
        WorldError: The backend does not carry them.
    """
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


def tell_all(store: Store, rank: int, size: int, said: Any) -> list[Any]:
    """What every worker says of its device, any JSON, by rank; all of them call this."""
    store.set(f"device/{rank}", json.dumps(said))
    return [json.loads(told) for told in store.multi_get([f"device/{other}" for other in range(size)])]


def check_devices(place: Place, device: torch.device, library: str, store: Store) -> None:
    """Check that all workers have a device of one kind, and none that another has, which only Gloo allows.

    Raises:
        WorldError: They do not; the same error on every worker.
    """
    own = accelerator.identity(device) if device.type != "cpu" else ""
    told = tell_all(store, place.rank, place.size, [socket.gethostname(), device.type, own])
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
