"""A program whose rank 0 works for a long time: `slow_work.py WORK SECONDS`; also parts for `lockstep train`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

SOURCE = "source"  # a named pipe, which yields a few bytes at a time
BYTES_PER_SAMPLE = 200_000
ALL = ("compile everywhere", "steps")  # all ranks do these; otherwise the others wait for rank 0


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def evaluation(seconds: float) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    right = 0
    for _ in _until(seconds):
        right += int((layers(torch.randn(16, 3, 32, 32)).argmax(1) == 1).sum())


def child(seconds: float) -> None:
    """Compute in children for a third of the time, of which a twentieth is a sign of life."""
    once = 'timeout 0.1 sh -c "while :; do :; done"'
    os.system(f"timeout {seconds} sh -c 'while :; do {once}; sleep 0.2; done'")


def _write_slowly(path: str, seconds: float) -> None:
    for _ in _until(seconds):
        with open(path, "wb") as file:
            file.write(bytes(1 << 20))  # not synced: a slow disk would not count as work here
        time.sleep(0.2)


def checkpoint(seconds: float) -> None:
    _write_slowly("file", seconds)


def checkpoint_thread(seconds: float) -> None:
    thread = threading.Thread(target=_write_slowly, args=("file", seconds))
    thread.start()
    thread.join()


def remote_checkpoint(seconds: float) -> None:
    """Write to what has no pages of its own, as some network file systems do: the system counts only the calls."""
    with open("sink", "wb", buffering=0) as file:
        for _ in _until(seconds):
            file.write(bytes(30_000))
            time.sleep(0.2)


def cold_cache(seconds: float) -> None:
    for _ in _until(seconds):
        _read_sample()


def compile_by_inductor(seconds: float) -> None:
    start = time.monotonic()
    for number in range(100):  # one after the other, until the time is over
        torch._dynamo.reset()
        layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()) for _ in range(6 + number)]
        net = torch.compile(nn.Sequential(*layers))
        net(torch.randn(2, 8, 16 + number, 16)).sum().backward()
        if time.monotonic() - start > seconds:
            return


def compile_by_backend(seconds: float) -> None:
    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        for _ in _until(seconds):
            _optimize(graph)
        return graph.forward

    torch.compile(nn.Linear(4, 4), backend=backend)(torch.ones(2, 4))


def _optimize(graph: torch.fx.GraphModule) -> int:
    return sum(len(node.name) for node in graph.graph.nodes)


def debugger(_: float) -> None:
    sys.stdin = os.fdopen(os.open("answers", os.O_RDONLY))
    print("debugging", flush=True)
    breakpoint()
    print("continued")


def steps(seconds: float) -> None:
    print("stepping", flush=True)
    for _ in range(int(seconds / 0.1)):
        time.sleep(0.1)
        dist.barrier()


WORKS = {
    "evaluation": evaluation,
    "child": child,
    "checkpoint": checkpoint,
    "checkpoint thread": checkpoint_thread,
    "remote checkpoint": remote_checkpoint,
    "cold cache": cold_cache,
    "inductor": compile_by_inductor,
    "compile everywhere": compile_by_inductor,
    "backend": compile_by_backend,
    "debugger": debugger,
    "steps": steps,
}


def _read_sample() -> None:
    with open(SOURCE, "rb", buffering=0) as file:
        missing = BYTES_PER_SAMPLE
        while missing:
            missing -= len(file.read(missing))


class ColdFiles(Dataset[tuple[torch.Tensor, int]], Sized):
    """Samples that are read from a slow file."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        _read_sample()
        return torch.full((3, 4, 4), index / 8), index % 4


def _quick() -> Dataset[Any]:
    return TensorDataset(torch.rand(16, 3, 4, 4), torch.arange(16) % 4)


def cold() -> tuple[Dataset[Any], Dataset[Any]]:
    """For `lockstep train --data slow_work:cold`."""
    return ColdFiles(), _quick()


def quick() -> tuple[Dataset[Any], Dataset[Any]]:
    """For `lockstep train --data slow_work:quick`: eight or more batches to evaluate."""
    return _quick(), TensorDataset(torch.rand(64, 3, 4, 4), torch.arange(64) % 4)


def slowly_saved() -> tuple[Dataset[Any], Dataset[Any]]:
    """For `lockstep train --data slow_work:slowly_saved`: its checkpoints are written slowly."""
    from lockstep.run.checkpoints import checkpoint_format

    save = checkpoint_format.save_file

    def save_slowly(*arguments: Any, **named: Any) -> None:
        _write_slowly("ballast", 5.0)
        save(*arguments, **named)

    checkpoint_format.save_file = save_slowly
    return _quick(), _quick()


class SlowInEvaluation(nn.Module):
    """A network that takes a second for each batch of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))

    def forward(self, images: torch.Tensor) -> Any:
        if not self.training:
            print("evaluating", flush=True)
            time.sleep(1.0)
        return self.layers(images)


def net(num_classes: int) -> nn.Module:
    """For `lockstep train --model slow_work:net`."""
    return SlowInEvaluation() if "SLOW_EVALUATION" in os.environ else nn.Sequential(nn.Flatten(), nn.Linear(48, 4))


if __name__ == "__main__":
    work, seconds = sys.argv[1], float(sys.argv[2])
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0 or work in ALL:
        WORKS[work](seconds)
    dist.barrier()
    print(f"rank {dist.get_rank()} is done")
    dist.destroy_process_group()
