"""The device of the suite: the GPU, or, to test the suite itself, the CPU or a simulated GPU at smaller sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lockstep.config.schema import DeviceChoice
from lockstep.world import accelerator

VARIABLE = "LOCKSTEP_GPU_SUITE_DEVICE"
DEVICE = torch.device(os.environ.get(VARIABLE, "cuda"))
ON_CUDA = DEVICE.type == "cuda"
ON_GPU = DEVICE.type != "cpu"  # also a simulated one
CHOICE: DeviceChoice = "gpu" if ON_GPU else "cpu"  # value of --device


def size(on_gpu: int, in_tests: int) -> int:
    """Return the size for the device in use."""
    return on_gpu if ON_CUDA else in_tests


def is_left_out(what: str) -> bool:
    """Print that `what` needs CUDA, and return True, on another device."""
    if not ON_CUDA:
        print(f"{what}: left out, needs CUDA", flush=True)
    return not ON_CUDA


def synchronize() -> None:
    """Wait until the device has finished all work."""
    if ON_GPU:
        torch.accelerator.synchronize()


def seconds_of(work: Callable[[], object], seconds: float, warmup: int = 3) -> float:
    """Return the mean time of a call, over as many consecutive calls as take about `seconds`.

    On a GPU, events time the calls, which excludes the host's time before the first and after the last.
    """
    for _ in range(warmup):
        work()
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    calls = max(3, min(1000, int(seconds / max(1e-6, time.perf_counter() - start))))
    if not ON_GPU:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls
    begin = accelerator.timestamp(DEVICE)
    for _ in range(calls):
        work()
    end = accelerator.timestamp(DEVICE)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / calls


@contextmanager
def deterministic() -> Iterator[None]:
    """Let torch take only kernels that give the same bits each time, if there are some."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
