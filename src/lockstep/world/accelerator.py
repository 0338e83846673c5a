"""The accelerator of this process: the only module that knows kinds of devices.

"cuda" are NVIDIA's GPUs and, under ROCm, AMD's; "xpu" Intel's; "mps" Apple's, for a single worker. torch is imported
when a function is called, so that a launcher can use its names at once. Elsewhere the question is only
whether a device is the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import first_line

if TYPE_CHECKING:
    import torch

KINDS = ("cuda", "xpu", "mps")
WITH_STREAMS = ("cuda", "xpu")
ALONE = ("mps",)  # for a single worker: without collectives
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables that hide devices from a process."""
TELLS_MORE = {"nccl": "NCCL_DEBUG=INFO has NCCL say", "xccl": "CCL_LOG_LEVEL=info has oneCCL say"}


def kind() -> str | None:
    """What kind of accelerator torch finds here: one of `KINDS`, or None."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None and found.type in KINDS else None


def outlives_fork() -> bool:
    """Whether a process that has imported torch, as it is built here, may fork others before it asks for a device."""
    import torch

    return not getattr(torch.version, "xpu", None)


def count() -> int:
    """How many devices of that kind this process sees."""
    import torch

    return torch.accelerator.device_count() if kind() else 0


def overlaps(device: torch.device) -> bool:
    """Whether the device has streams, so that copies from pinned memory can overlap with its work."""
    return device.type in WITH_STREAMS


def use(device: torch.device) -> None:
    """Make a device this thread's current one. A new thread's is the first, whichever the others use."""
    import torch

    if overlaps(device):
        torch.accelerator.set_device_index(device.index)


def current() -> torch.device:
    """This thread's current device; the CPU where there is no accelerator."""
    import torch

    found = kind()
    return torch.device(found, torch.accelerator.current_device_index()) if found else torch.device("cpu")


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which this thread's operations of the device are."""
    import torch

    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device, urgent: bool = False) -> torch.Stream:
    """A stream of its own; an urgent one's kernels go before those of others."""
    import torch

    return torch.Stream(device, priority=-1 if urgent else 0)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Put this thread's operations on a stream."""
    # Not `with stream`, which keeps what was before on the stream, where another thread's would overwrite it.
    import torch

    before, index = current_stream(stream.device), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # and so the current device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def new_event(device: torch.device, timing: bool = False) -> torch.Event:
    """A mark for a stream's `record_event`; with `timing`, one whose time can be read."""
    import torch

    return torch.Event(device, enable_timing=timing)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Empty, contiguous host memory for a tensor's values, to which a device with streams copies while it works.

    Where there is no more memory that can be pinned, plain memory, to which it copies while the host waits.
    """
    import torch

    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream's operations are being captured into a graph instead of run."""
    capturing = getattr(_module(device.type), "is_current_stream_capturing", None)
    return bool(capturing()) if capturing else False


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device, or the current one, has done all that was asked of it; nothing for the CPU."""
    import torch

    if device.type != "cpu" if device is not None else kind():
        torch.accelerator.synchronize(device)


def tune(device: torch.device) -> None:
    """Have cuDNN time its kernels for each new shape and keep the fastest, unless torch is to be deterministic.

    NVIDIA's alone: MIOpen's search takes minutes. The kernel may be another one in the next process.
    """
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    if device.type == "cuda" and torch.version.hip is None and not deterministic:
        torch.backends.cudnn.benchmark = True


def seed(number: int) -> None:
    """Seed the random numbers of the current device, if this process has used it."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    if built_for is not None and built_for.type in KINDS:
        module = torch.get_device_module(built_for)
        in_use = getattr(module, "is_initialized", None) or module.is_available
        if in_use():
            module.manual_seed(number)


def name(device: torch.device | None = None) -> str:
    """What the maker calls a device, or the current one."""
    module = _module(device.type if device is not None else kind() or "")
    get_name = getattr(module, "get_device_name", None)
    return str(get_name(device)) if get_name else "Apple GPU"


def names() -> list[str]:
    """The names of all devices that this process sees."""
    import torch

    found = kind()
    return [name(torch.device(found, index)) for index in range(count())] if found else []


def identity(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """What tells a device from all others of its host: its UUID and PCI address, as far as torch knows them."""
    import torch

    properties = _module(device.type).get_device_properties(device)
    parts = [str(getattr(properties, field, "")) for field in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")]
    visible = [environment[name] for name in VISIBLE if name in environment]
    # Parts of one GPU have names of their own there alone (MIG), or numbers (AMD's MI300).
    parts += [*visible, str(device.index)] if torch.version.hip else [n for n in visible if n.startswith("MIG-")]
    if not any(parts):
        parts = [environment.get("ZE_AFFINITY_MASK", ""), str(device.index)]
    return " ".join(filter(None, parts))


def total_memory(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "mps":
        return int(_module("mps").recommended_max_memory())
    return int(_module(device.type).get_device_properties(device).total_memory)


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors of this process have taken of a device at one time; on "mps", what they take now."""
    module = _module(device.type)
    return int(module.current_allocated_memory() if device.type == "mps" else module.max_memory_allocated(device))


def limit_memory(device: torch.device, size_bytes: int) -> None:
    """Let this process take no more of a device's memory."""
    fraction = min(1.0, size_bytes / total_memory(device))
    _module(device.type).set_per_process_memory_fraction(fraction)


def build() -> str:
    """What this torch is built for."""
    import torch

    known = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "oneAPI": torch.version.xpu}
    built = [f"{name} {number}" for name, number in known.items() if number]
    return ", ".join(built) or ("Apple's GPUs" if torch.backends.mps.is_built() else "the CPU alone")


def drivers(modules: Path = Path("/sys/module")) -> list[str]:
    """The GPU drivers that this machine's Linux has loaded, with their versions where they have one of their own."""
    found = []
    for module, maker in {"nvidia": "NVIDIA", "amdgpu": "AMD", "xe": "Intel", "i915": "Intel"}.items():
        if (modules / module).is_dir():
            number = modules / module / "version"
            found.append(f"{maker}'s {module} {number.read_text().strip() if number.exists() else ''}".strip())
    return found


def why_none() -> str:
    """What keeps torch from finding a device, in its own words; "" where it says nothing."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    init = getattr(_module(built_for.type), "init", None) if built_for is not None else None
    try:
        if init:
            init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return ""


def libraries() -> list[str]:
    """The libraries for collectives that this torch has, with the version of NCCL, which ROCm's RCCL stands in for."""
    import torch
    import torch.distributed as dist

    found = [name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)]
    if "nccl" in found:
        found[found.index("nccl")] = f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return found


def backend(kind_of_device: str) -> str:
    """What torch.distributed calls the library for collectives of a kind of device: nccl, xccl, or gloo."""
    import torch.distributed as dist

    known: str = dist.get_default_backend_for_device(kind_of_device)
    return known


def has_collectives(kind_of_device: str) -> bool:
    """Whether this torch has that library."""
    import torch.distributed as dist

    return kind_of_device in WITH_STREAMS and bool(dist.is_backend_available(backend(kind_of_device)))


def may_be_shared() -> bool:
    """Whether the library lets workers share a device, which newer NCCLs do where they are told."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Connect `size` workers for collectives on their devices, outside torch.distributed's registry.

    Nothing but the caller ends it: `shutdown()` after a good end, `abort()` where a peer is gone.

    Args:
        timeout: How long an operation may take, from its start on the device, before the group fails.
    """
    import torch.distributed as dist

    if device.type == "xpu":
        if not hasattr(dist.ProcessGroupXCCL, "Options"):  # torch 2.8, where an operation may take as long as it likes
            return dist.ProcessGroupXCCL(store, rank, size)  # type: ignore[call-arg]
        xccl_options = dist.ProcessGroupXCCL.Options()
        xccl_options._timeout = timeout
        return dist.ProcessGroupXCCL(store, rank, size, xccl_options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    # An error is its owner's business: torch would abort the group, or end the process, before that knows of it.
    with _variables(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0"):
        if hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0":  # torch's choice, too
            return dist.ProcessGroupNCCL2(store, rank, size, options, device)
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Set variables that torch reads within; those that the user has set remain as they are."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _module(kind_of_device: str) -> Any:
    import torch

    return torch.get_device_module(kind_of_device)
