"""A program that hangs on one rank: `hanging.py ENGINE KIND RANK`; also model and data for `lockstep train`."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

AT = 12  # the step that hangs
FOREVER = 10_000


def misbehave(kind: str) -> None:
    if kind == "sleep":
        time.sleep(FOREVER)
    elif kind == "busy":
        while True:
            pass
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "gil":
        sleep = ctypes.PyDLL(None).sleep
        while True:
            sleep(FOREVER)
    elif kind == "gil beside threads":
        for _ in range(16):
            threading.Thread(target=_idle, args=(30,), daemon=True).start()
        misbehave("gil")
    elif kind == "mutex":
        mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
        native = ctypes.PyDLL(None)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)
    elif kind == "once":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(FOREVER)
    elif kind == "branch":
        dist.barrier()
    else:
        raise ValueError(kind)


def _idle(depth: int) -> None:
    """Wait forever, below so many frames."""
    if depth:
        _idle(depth - 1)
    else:
        time.sleep(FOREVER)


class Net(nn.Module):
    """A small network; one of its forward passes in training never ends on one rank."""

    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self._kind, self._rank, self._passes = kind, rank, 0

    def forward(self, images: torch.Tensor) -> Any:
        self._passes += self.training
        if self._passes == AT and self._rank == int(os.environ["RANK"]) and self._kind not in ("data", "evaluation"):
            misbehave(self._kind)
        is_evaluation = not self.training and self._passes > AT  # and not a trial before training
        if is_evaluation and self._kind == "evaluation" and self._rank == int(os.environ["RANK"]):
            misbehave("sleep")
        return self.layers(images)


class Images(Dataset[tuple[torch.Tensor, int]], Sized):
    """Samples, one of which blocks forever on one rank."""

    def __init__(self, kind: str, rank: int, length: int = 240) -> None:
        self._is_bad = kind == "data" and rank == int(os.environ.get("RANK", -1))
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._is_bad and multiprocessing.parent_process():  # `fit` reads samples before the workers connect
            time.sleep(FOREVER)
        return torch.full((3, 4, 4), index / self._length), index % 4


def data() -> tuple[Dataset[Any], Dataset[Any]]:
    """For `lockstep train --data hanging:data`."""
    kind, rank = os.environ["HANGING"].split()
    validation = TensorDataset(torch.zeros(24, 3, 4, 4), torch.arange(24) % 4)
    return Images(kind, int(rank)), validation


def net(num_classes: int) -> nn.Module:
    """For `lockstep train --model hanging:net`."""
    kind, rank = os.environ["HANGING"].split()
    return Net(kind, int(rank))


def _start(kind: str, rank: int) -> None:
    if kind == "early" and rank == int(os.environ["RANK"]):
        misbehave("sleep")


def _ddp(kind: str, rank: int) -> None:
    _start(kind, rank)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(Net(kind, rank))
    loader = DataLoader(Images(kind, rank), batch_size=4, num_workers=1 if kind == "data" else 0)
    for images, _ in loader:
        model(images).mean().backward()


def _gpu(backend: str, kind: str, rank: int) -> None:
    import simgpu

    simgpu.install()
    device = torch.device("simgpu", int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(backend, device_id=device)
    model = nn.parallel.DistributedDataParallel(Net(kind, rank).to(device))
    for images, _ in DataLoader(Images(kind, rank), batch_size=4):
        loss = model(images.to(device)).mean()
        loss.backward()
        loss.item()


def _hvd(kind: str, rank: int) -> None:
    from lockstep import hvd

    _start(kind, rank)
    hvd.init()
    model = Net("none" if kind == "branch" else kind, rank)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    loader = DataLoader(Images(kind, rank), batch_size=4, num_workers=1 if kind == "data" else 0)
    for step, (images, _) in enumerate(loader, start=1):
        if kind == "branch" and step == AT and hvd.rank() == rank:
            hvd.allreduce(torch.ones(3), name="loss")
        optimizer.zero_grad()
        model(images).mean().backward()
        optimizer.step()


def _fit(kind: str, rank: int) -> None:
    from lockstep.train import fit

    os.environ["HANGING"] = f"{kind} {rank}"
    training, validation = data()
    fit(
        net(4), training, validation, epochs=2, batch_size=4, lr=0.01, run_dir="fit-run", device="cpu", loader_workers=1
    )


if __name__ == "__main__":
    engines = {"ddp": _ddp, "hvd": _hvd, "fit": _fit}
    engine = engines.get(sys.argv[1], partial(_gpu, sys.argv[1]))  # else a backend of the simulated GPU
    engine(sys.argv[2], int(sys.argv[3]))
