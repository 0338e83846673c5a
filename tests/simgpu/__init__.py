"""A real torch device for tests on a CPU: streams, events, stream-ordered memory, and collectives as NCCL's.

Call `install()` once in a process of its own, such as a worker of `simulated_gpu.run_on_gpus`: a process has only one
PrivateUse1 device. Afterwards "simgpu" is the device of torch.accelerator, and "simccl" its backend. README.md says
what is simulated.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from simgpu import build
from simgpu.device_module import device_module

MissingCompilerError = build.MissingCompilerError
NAME = "simgpu"
BACKEND = "simccl"
LAUNCHED = re.compile(r"launched on stream (\d+): (.*)")


def install(devices: int = 2, float64: bool = True) -> None:
    """Make `devices` simulated devices this process's accelerators, for the rest of its life.

    Args:
        float64: Whether they support it, unlike Apple's. Otherwise a float64 tensor raises a TypeError.

    Raises:
        MissingCompilerError: The device cannot be compiled on this machine.
    """
    if not _extension.cache_info().currsize:
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, device_module(_extension()))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        atexit.register(_report_failure)
        dist.Backend.register_backend(BACKEND, _group, extended_api=True, devices=[NAME])
    _extension().set_device_count(devices)
    _extension().set_float64(float64)


def contexts() -> set[int]:
    """Return the devices that this process has touched; on a GPU, each has a context of some 500 MB there."""
    return set(_extension().contexts())


def counts() -> Counter[str]:
    """Return how often each of these happened in this process, on all devices and threads.

    - "host wait: stream", "host wait: event", "host wait: device", "host wait: copy", "host wait: item",
      "host wait: data-dependent operation": the calling thread waited for a device
    - "operations enqueued", "copies enqueued", "collectives", "streams recorded"
    - "operations run at once", and "run at once: NAME": operations that a GPU would have enqueued
    - "events used by a thread on another device"
    - "failed operations"
    - "enqueued while the GIL is held": by a thread that would keep it if the launch queue were full
    """
    return Counter({name: count for name, count in _extension().counts().items() if not LAUNCHED.fullmatch(name)})


def launches() -> dict[int, Counter[str]]:
    """Return the operations, copies and collectives that were enqueued, by stream; the default stream is number 0."""
    found: dict[int, Counter[str]] = defaultdict(Counter)
    for name, count in _extension().counts().items():
        if launched := LAUNCHED.fullmatch(name):
            found[int(launched[1])][launched[2]] = count
    return dict(found)


def event_waits() -> list[int]:
    """Return, for each "host wait: event", how much work was in the event's stream behind it: 0 if it became idle."""
    return list(_extension().event_waits())


def reset_counts() -> None:
    """Set all counts and launches to 0, and forget the waits for events."""
    _extension().reset_counts()


def delays(seed: int = 0, copy_us: int = 0, operation_us: int = 0, collective_us: int = 0) -> None:
    """Delay each copy, operation and collective by a random time between half of and the whole given duration."""
    _extension().set_delays(seed, copy_us, operation_us, collective_us)


def limit_memory(device: torch.device, size_bytes: int) -> None:
    """Let allocations beyond `size_bytes` on a device fail with torch.OutOfMemoryError."""
    _extension().limit_memory(device.index, size_bytes)


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let a stream wait before all that is enqueued within the block, until the block ends."""
    hold = _extension().Hold(stream)
    try:
        yield
    finally:
        hold.release()


def launch_failing_operation(stream: torch.Stream) -> None:
    """Enqueue an operation that fails when it runs, as a kernel with an illegal memory access does."""
    _extension().launch_failing_operation(stream)


def unreported_failure() -> str:
    """Return the error of an operation that failed and that no later call has reported; "" if all is well."""
    return str(_extension().unreported_failure())


def late_writes() -> int:
    """Return how many blocks of memory were written to after they had been freed."""
    return int(_extension().late_writes())


def _report_failure() -> None:
    if failure := unreported_failure():
        print(f"simgpu: no call has reported this error: {failure}", file=sys.stderr)


def _group(options: Any, _: object) -> Any:
    if text := os.environ.get("SIMGPU_GROUP_ERROR"):
        raise dist.DistBackendError(text)
    store = dist.PrefixStore(BACKEND, options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return _extension().Group(gloo, options.group_rank, options.group_size, options.timeout)


@cache
def _extension() -> Any:
    spec = importlib.util.spec_from_file_location(build.NAME, build.built())
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
