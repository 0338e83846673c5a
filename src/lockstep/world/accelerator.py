"""The accelerator of this process. Other modules use these functions instead of testing for a kind of accelerator.

"cuda" means NVIDIA GPUs and, under ROCm, AMD GPUs; "xpu" Intel GPUs; "mps" Apple GPUs, for a single worker. Any other
device that torch finds, such as "npu", needs streams, events and a registered backend for collectives. torch is
imported when a function is called, so that a launcher can use the constants without it.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.errors import first_line

if TYPE_CHECKING:
    import numpy as np
    import torch

ALONE = ("mps",)  # without collectives, so for a single worker, and without streams
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables that hide devices from a process."""
WITHOUT_DIRECT_ACCESS = {"nccl": {"NCCL_P2P_DISABLE": "1"}}
"""By library: variables with which GPUs of a machine exchange data through its memory."""
DEBUG_VARIABLES = {"nccl": "NCCL_DEBUG=INFO", "xccl": "CCL_LOG_LEVEL=info"}


def kind() -> str | None:
    """Return the kind of accelerator that torch finds, such as "cuda", or None."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else None


def outlives_fork() -> bool:
    """Whether a process that has imported this build of torch may fork before it uses a device."""
    import torch

    return not getattr(torch.version, "xpu", None)


def count() -> int:
    """Return the number of accelerators that are visible to this process."""
    import torch

    return torch.accelerator.device_count() if kind() else 0


def overlaps(device: torch.device) -> bool:
    """Whether the device has streams, so that copies from pinned memory can overlap with computation."""
    return device.type not in ("cpu", "meta", *ALONE)


def send(values: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Copy an array to a device; asynchronously from pinned memory, if the device has streams.

    Without float64 on the device, such numbers arrive as float32.
    """
    import torch

    tensor = torch.from_numpy(values)
    if tensor.dtype == torch.float64:
        tensor = tensor.to(sum_dtype(device))
    return tensor.pin_memory().to(device, non_blocking=True) if overlaps(device) else tensor.to(device)


def use(device: torch.device) -> None:
    """Make a device this thread's current one. A new thread starts with device 0."""
    import torch

    if overlaps(device):
        torch.accelerator.set_device_index(device.index)


def make_current(device: torch.device) -> int | None:
    """Make a device this thread's current one; return the index of the one before, None if it was the same."""
    import torch

    before: int = torch.accelerator.current_device_index()
    if before == device.index:
        return None
    use(device)
    return before


def current() -> torch.device:
    """Return this thread's current device; the CPU if there is no accelerator."""
    import torch

    found = kind()
    return torch.device(found, torch.accelerator.current_device_index()) if found else torch.device("cpu")


def current_stream(device: torch.device) -> torch.Stream:
    """Return this thread's current stream on the device."""
    import torch

    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device, urgent: bool = False) -> torch.Stream:
    """Return a new stream; with `urgent`, one of high priority."""
    import torch

    return torch.Stream(device, priority=-1 if urgent else 0)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Enqueue this thread's operations on a stream."""
    # Not `with stream`: it stores the previous stream in the stream object, which another thread would overwrite.
    import torch

    before, index = current_stream(stream.device), torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)  # also sets the current device
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def timestamp(device: torch.device) -> Any:
    """Return an event with a time, recorded in this thread's current stream.

    Recording blocks while the queue of launches is full, such as after a loss. `torch.Event` then keeps the GIL, so no
    thread can abort; `torch.cuda.Event` of torch 2.15 releases it.
    """
    module = _module(device.type)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty, contiguous host tensor of the same shape and dtype, pinned so that copies are asynchronous.

    If no more memory can be pinned, the tensor is not pinned, and the host waits for copies to it.
    """
    import torch

    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def read_later(tensor: torch.Tensor) -> Callable[[], list[Any] | None]:
    """Start to copy a tensor to the host, and return what returns its values; None while they are not there yet."""
    if tensor.device.type == "cpu":
        values = tensor.tolist()
        return lambda: values
    copy = pinned_like(tensor).copy_(tensor, non_blocking=True)
    copied = current_stream(tensor.device).record_event()
    return lambda: copy.tolist() if copied.query() else None


def processor(device: torch.device) -> str:
    """Name the processor of a device, as far as it affects rounding."""
    import torch

    return name(device) if device.type != "cpu" else f"a CPU with {torch.backends.cpu.get_cpu_capability()}"


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on a device: float64, or float32 for GPUs without it (Apple's, some of Intel's)."""
    import torch

    if device.type in ("cpu", "meta", "cuda"):
        return torch.float64
    get_properties = getattr(_module(device.type), "get_device_properties", None)  # Apple's GPUs have none
    has_float64 = device.type != "mps" and getattr(get_properties(device) if get_properties else None, "has_fp64", True)
    return torch.float64 if has_float64 else torch.float32


def why_no_tf32(device: torch.device) -> str:
    """Return why float32 matrix products on a device cannot use TF32; "" if they can."""
    import torch

    supports = None if device.type in ("cpu", "xpu") else getattr(_module(device.type), "is_tf32_supported", None)
    if supports is None:
        return f"torch has no TF32 on {name(device) if device.type != 'cpu' else 'CPUs'}"
    if not supports():
        return f"{name(device)} has no TF32, which NVIDIA's GPUs have from Ampere on, and AMD's from MI300 on"
    try:
        with tf32_products():  # AMD's libraries ignored the setting until torch 2.9
            return "" if torch.backends.cuda.matmul.allow_tf32 else "it needs HIPBLASLT_ALLOW_TF32=1 with this torch"
    except RuntimeError as error:  # the script has used torch's newer settings, with which these cannot be mixed
        return first_line(error)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Compute float32 matrix products in TF32 during the block, in all threads."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is capturing a graph."""
    capturing = getattr(_module(device.type), "is_current_stream_capturing", None)
    return bool(capturing()) if capturing else False


def synchronize(device: torch.device | None = None) -> None:
    """Wait until a device, or the current one, has finished all enqueued work. Do nothing for the CPU."""
    import torch

    if device.type != "cpu" if device is not None else kind():
        torch.accelerator.synchronize(device)


def why_unusable(device: torch.device, seconds: float) -> str:
    """Return why a device does not compute any more; "" if it has finished all work, and a new operation, in time."""
    import torch

    found = [f"it has not finished its work within {seconds:g} s"]

    def compute() -> None:
        use(device)
        try:
            synchronize(device)
            torch.zeros(1, device=device).add_(1)
            synchronize(device)
            found.append("")
        except RuntimeError as error:
            found.append(first_line(error))

    thread = threading.Thread(target=compute, daemon=True)  # a call to the driver may never return
    thread.start()
    thread.join(seconds)
    return found[-1]


def empty_cache() -> None:
    """Give memory that torch keeps for later tensors back to the device, for libraries that allocate beside torch."""
    if (found := kind()) and (empty := getattr(_module(found), "empty_cache", None)):
        empty()


def tune(device: torch.device) -> None:
    """Let cuDNN benchmark its kernels for each new shape, unless torch is set to be deterministic.

    For NVIDIA only: MIOpen's search takes minutes. Another process may choose another kernel.
    """
    import torch

    deterministic = torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
    if device.type == "cuda" and torch.version.hip is None and not deterministic:
        torch.backends.cudnn.benchmark = True


def seed(number: int) -> None:
    """Seed the current device's random number generator, if this process has used the device."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    if built_for is not None:
        module = torch.get_device_module(built_for)
        in_use = getattr(module, "is_initialized", None) or module.is_available
        if in_use():
            module.manual_seed(number)


def name(device: torch.device | None = None) -> str:
    """Return the product name of a device, or of the current one."""
    found = device.type if device is not None else kind() or ""
    get_name = getattr(_module(found), "get_device_name", None)
    if get_name:
        return str(get_name(device))
    return "Apple GPU" if found == "mps" else found


def names() -> list[str]:
    """Return the product names of all visible devices."""
    import torch

    found = kind()
    return [name(torch.device(found, index)) for index in range(count())] if found else []


def identity(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Return a string that identifies a device on its host, from the UUID and PCI address that torch reports."""
    import torch

    get_properties = getattr(_module(device.type), "get_device_properties", lambda device: None)
    properties = get_properties(device)
    parts = [str(getattr(properties, field, "")) for field in ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")]
    visible = [environment[name] for name in VISIBLE if name in environment]
    # Partitions of a GPU differ only in the visible name (MIG) or the index (AMD MI300).
    parts += [*visible, str(device.index)] if torch.version.hip else [n for n in visible if n.startswith("MIG-")]
    if not any(parts):
        parts = [environment.get("ZE_AFFINITY_MASK", ""), str(device.index)]
    return " ".join(filter(None, parts))


def card(device: torch.device) -> str:
    """Return a string that is equal for devices of a host that the library for collectives takes for one.

    NCCL compares PCI addresses, so it refuses two MIG instances of a GPU. RCCL and XCCL connect parts of a device.
    """
    import torch

    if device.type == "cuda" and not torch.version.hip and (address := pci_address(device)):
        return f"PCI address {address}"
    return identity(device)


def pci_address(device: torch.device) -> str:
    """Return a device's PCI address, such as 0000:4d:00; "" if torch does not report it."""
    get_properties = getattr(_module(device.type), "get_device_properties", None) if overlaps(device) else None
    properties: Any = get_properties and get_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"


def total_memory(device: torch.device) -> int:
    """Return the size of a device's memory in bytes."""
    if device.type == "mps":
        return int(_module("mps").recommended_max_memory())
    return int(_module(device.type).get_device_properties(device).total_memory)


def peak_memory(device: torch.device | None) -> int:
    """Return the peak of this process's memory in bytes: of its tensors on a device (on "mps", their current memory).

    On a CPU, or with None, of all that is resident.
    """
    if device is None or device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    module = _module(device.type)
    return int(module.current_allocated_memory() if device.type == "mps" else module.max_memory_allocated(device))


def utilization(device: torch.device) -> float | None:
    """Return the share of the last second or less in which a device computed anything, by its driver's library.

    None without that library (`nvidia-ml-py`, or `amdsmi` for AMD), or if it does not tell, such as for MIG instances.
    """
    read = getattr(_module(device.type), "utilization", None)
    try:
        return read(device) / 100 if read else None
    except Exception:  # torch raises ModuleNotFoundError, RuntimeError and the library's own errors
        return None


def limit_memory(device: torch.device, size_bytes: int) -> None:
    """Limit this process's share of a device's memory."""
    fraction = min(1.0, size_bytes / total_memory(device))
    _module(device.type).set_per_process_memory_fraction(fraction)


def build() -> str:
    """Describe the platform that torch is built for."""
    import torch

    known = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "oneAPI": torch.version.xpu}
    built = [f"{name} {number}" for name, number in known.items() if number]
    return ", ".join(built) or ("Apple GPUs" if torch.backends.mps.is_built() else "CPU only")


def why_none() -> str:
    """Return torch's error message about why it finds no device; "" if it gives none."""
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
    """Return this torch's libraries for collectives, with the version of NCCL (under ROCm: RCCL)."""
    import torch
    import torch.distributed as dist

    found = [name for name in ("gloo", "nccl", "xccl", "mpi") if dist.is_backend_available(name)]
    if "nccl" in found:
        found[found.index("nccl")] = f"nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return found


def backend(kind_of_device: str) -> str:
    """Return torch.distributed's default backend for a kind of device, such as nccl; gloo if there is no other."""
    import torch.distributed as dist

    try:
        return str(dist.get_default_backend_for_device(kind_of_device))
    except ValueError:
        return "gloo"


def has_collectives(kind_of_device: str) -> bool:
    """Whether this torch has collectives for a kind of device, other than Gloo's."""
    import torch.distributed as dist

    library = backend(kind_of_device)
    return library != "gloo" and bool(dist.is_backend_available(library))


def may_be_shared() -> bool:
    """Whether workers may share a device: recent NCCL allows it if NCCL_MULTI_RANK_GPU_ENABLE is 1."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Connect `size` workers for collectives on their devices, outside torch.distributed's registry.

    The caller ends it: with `shutdown()` normally, with `abort()` if a peer died.

    Args:
        timeout: Limit for an operation, from its start on the device, before the group fails.
    """
    import torch.distributed as dist

    if device.type == "xpu":
        if not hasattr(dist.ProcessGroupXCCL, "Options"):  # torch 2.8, without a timeout
            return dist.ProcessGroupXCCL(store, rank, size)  # type: ignore[call-arg]
        xccl_options = dist.ProcessGroupXCCL.Options()
        xccl_options._timeout = timeout
        return dist.ProcessGroupXCCL(store, rank, size, xccl_options)
    if device.type != "cuda":
        return _registered_group(store, rank, size, device, timeout)
    options = group_options("nccl", timeout)
    with without_error_handling():
        if hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0":  # as torch chooses
            return dist.ProcessGroupNCCL2(store, rank, size, options, device)
        return dist.ProcessGroupNCCL(store, rank, size, options)


def group_options(library: str, timeout: timedelta) -> Any:
    """Return the options of a library's groups; None for its defaults.

    NCCL's collectives get high priority, so that they do not wait behind the kernels of a backward pass.
    """
    import torch.distributed as dist

    if library != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = True
    return options


def _registered_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """Connect workers with the backend that another package has registered for a kind of device."""
    import torch.distributed as dist

    plugin = dist.Backend._plugins[backend(device.type).upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


@contextmanager
def without_error_handling() -> Iterator[None]:
    """Let the owner of a group created in the block handle its errors.

    Otherwise NCCL's watchdog would abort the group or end the process, such as for a lost peer on another host, before
    the owner notices. Launchers set these variables for torch's own groups.
    """
    values = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _module(kind_of_device: str) -> Any:
    import torch

    return torch.get_device_module(kind_of_device)
