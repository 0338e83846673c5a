"""Choose a worker's device, check the devices of all workers against each other, and count the usable cores."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from lockstep.errors import WorldError, plural
from lockstep.world import accelerator

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

    from lockstep.world.launcher_environment import RankInfo

GLOO = "gloo"


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def choose_device(rank_info: RankInfo, device: str, may_share: bool = False) -> torch.device:
    """Return the device of a worker: the one of its local rank, or the only one that is visible to it.

    Raises:
        WorldError: There is no device of that kind, or fewer devices than workers and `may_share` is False.
    """
    import torch

    found = accelerator.kind() if device != "cpu" else None
    if device == "cpu" or (device == "auto" and (found is None or (found in accelerator.ALONE and rank_info.size > 1))):
        return torch.device("cpu")
    if found is None or device not in ("auto", "gpu", found):
        wanted = "accelerator" if device == "gpu" else f"{device.upper()} device"
        raise WorldError(f"--device {device}: torch finds no {wanted} here; `lockstep doctor` shows why")
    if found in accelerator.ALONE and rank_info.size > 1:
        raise WorldError(f"--device {found} supports only a single worker; use -np 1, or --device cpu")
    count = accelerator.count()
    if count == 1 and _sees_one_device():
        return torch.device(found, 0)  # a launcher or a script chose one for each worker
    if rank_info.local_size > count and not may_share:
        raise WorldError(
            f"{rank_info.local_size} workers on {socket.gethostname()}, which has {plural(count, 'GPU')}"
            f"{_slurm_hint(rank_info)}; start at most one worker per GPU, or add --device cpu, or --dist-backend gloo, "
            f"which lets workers share a GPU"
        )
    return torch.device(found, rank_info.local_rank % count)


def choose_library(device: torch.device, backend: str) -> str:
    """Return the library for collectives on the device: the backend, or for "auto" the device's default.

    Raises:
        WorldError: The backend does not support the device's tensors.
    """
    own = GLOO if device.type in ("cpu", *accelerator.ALONE) else accelerator.backend(device.type)
    if backend not in ("auto", GLOO, own):
        raise WorldError(
            f"--dist-backend {backend} does not support tensors on {device.type}, this worker's device; use "
            f"{own}, or leave it out"
        )
    return own if backend == "auto" else backend


def _sees_one_device() -> bool:
    """Whether a variable makes a single GPU visible to this process."""
    chosen = [os.environ[name] for name in accelerator.VISIBLE if os.environ.get(name)]
    return any(len(text.split(",")) == 1 for text in chosen)


def _slurm_hint(rank_info: RankInfo) -> str:
    from lockstep.world.launcher_environment import SLURM  # which a node process, that counts cores, does not need

    if rank_info.launcher != SLURM.name:
        return ""
    on_node = os.environ.get("SLURM_GPUS_ON_NODE", "none")
    return f" visible (SLURM_GPUS_ON_NODE={on_node}; srun --gpus-per-node=N --gpu-bind=none shows all to each task)"


def check_devices(rank_info: RankInfo, device: torch.device, library: str, store: Store) -> None:
    """Check that all workers have the same kind of device and, except with Gloo, that no two share one.

    Raises:
        WorldError: The kinds differ, or workers share a device; every worker raises the same error.
    """
    from lockstep.world.rendezvous import exchange  # which a launcher, that counts cores, does not need

    own = [accelerator.card(device), accelerator.identity(device)] if device.type != "cpu" else ["", ""]
    described = exchange(store, rank_info.rank, rank_info.size, [socket.gethostname(), device.type, *own])
    ranks_of: dict[str, list[int]] = {}
    workers: dict[tuple[str, str], list[int]] = {}
    for rank, (host, kind, card, _) in enumerate(described):
        ranks_of.setdefault(kind, []).append(rank)
        workers.setdefault((host, card), []).append(rank)
    if len(ranks_of) > 1:
        kinds = ", ".join(f"{kind} for workers {ranks} ({described[ranks[0]][0]})" for kind, ranks in ranks_of.items())
        raise WorldError(
            f"the workers' devices differ: {kinds}; run `lockstep doctor` there to see why, or add --device cpu"
        )
    for (host, card), ranks in workers.items():
        if len(ranks) > 1 and library != GLOO and not accelerator.may_be_shared():
            identities = [described[rank][3] for rank in ranks]
            if len(set(identities)) == len(ranks):
                raise WorldError(
                    f"workers {ranks} on {host} have parts (MIG instances) of one GPU, {card}, which NCCL does not "
                    f"connect; use one worker per GPU, or --dist-backend gloo"
                )
            raise WorldError(
                f"workers {ranks} on {host} share the GPU {identities[0]}: CUDA_VISIBLE_DEVICES or a similar variable "
                f"is the same for all; set a different GPU for each worker, unset it (Slurm: --gpus-per-node=N "
                f"--gpu-bind=none), or add --device cpu, or --dist-backend gloo, which lets them share it"
            )
