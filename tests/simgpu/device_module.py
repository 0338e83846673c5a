"""The module torch.simgpu, which torch and Lockstep ask for what torch.accelerator does not offer."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, Self

import torch

Device = torch.device | str | int | None


def device_module(extension: Any) -> ModuleType:
    """Return the functions of torch.cuda that have a meaning here, as a module."""
    module = ModuleType("torch.simgpu", __doc__)
    functions = _Functions(extension)
    for name in dir(functions):
        if not name.startswith("__"):
            setattr(module, name, getattr(functions, name))
    return module


class _Functions:
    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self.device_count = extension.device_count
        self.current_device = extension.current_device
        self._is_in_bad_fork = extension.is_in_bad_fork

    def _index(self, device: Device) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return int(self._extension.current_device() if index is None else index)

    def is_available(self) -> bool:
        return bool(self._extension.device_count() > 0)

    def is_initialized(self) -> bool:
        return bool(self._extension.contexts()) and not self._is_in_bad_fork()

    def init(self) -> None:
        self._lazy_init()

    def _lazy_init(self) -> None:
        if self._is_in_bad_fork():
            raise RuntimeError("Cannot re-initialize simgpu in forked subprocess")

    def set_device(self, device: Device) -> None:
        torch.accelerator.set_device_index(self._index(device))

    def device(self, device: Device) -> Any:
        return _OnDevice(self._index(device))

    def current_stream(self, device: Device = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(device))

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream  # a context manager

    def Stream(self, device: Device = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(torch.device("simgpu", self._index(device)), priority=priority)

    def Event(self, enable_timing: bool = False) -> _Event:
        return _Event(self._extension, enable_timing)

    def synchronize(self, device: Device = None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def is_current_stream_capturing(self) -> bool:
        return False

    def graph(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("simgpu does not simulate graph capture")

    CUDAGraph = Graph = graph_pool_handle = graph

    def manual_seed(self, seed: int) -> None:
        self._extension.default_generator(self._index(None)).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self._extension.device_count()):
            self._extension.default_generator(index).manual_seed(seed)

    def initial_seed(self) -> int:
        return int(self._extension.default_generator(self._index(None)).initial_seed())

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        state: torch.Tensor = self._extension.default_generator(self._index(device)).get_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        self._extension.default_generator(self._index(device)).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True

    def is_tf32_supported(self) -> bool:
        return True  # it computes in float32

    def get_device_name(self, device: Device = None) -> str:
        return "Simulated GPU"

    def get_device_properties(self, device: Device = None) -> SimpleNamespace:
        index = self._index(device)
        limit_bytes, _, _ = self._extension.memory_statistics(index)
        return SimpleNamespace(
            name=self.get_device_name(),
            uuid=f"SIM-{index}",
            total_memory=limit_bytes,
            has_fp64=self._extension.has_float64(),
        )

    def memory_allocated(self, device: Device = None) -> int:
        return int(self._extension.memory_statistics(self._index(device))[1])

    def max_memory_allocated(self, device: Device = None) -> int:
        return int(self._extension.memory_statistics(self._index(device))[2])

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        self._extension.reset_peak_memory(self._index(device))

    def set_per_process_memory_fraction(self, fraction: float, device: Device = None) -> None:
        index = self._index(device)
        self._extension.limit_memory(index, int(fraction * self._extension.memory_statistics(index)[0]))

    def empty_cache(self) -> None:
        self._extension.empty_cache()


class _Event(torch.Event):
    """An event of torch whose recording releases the GIL, as `torch.cuda.Event`'s does."""

    def __new__(cls, extension: Any, enable_timing: bool) -> Self:
        event = super().__new__(cls, "simgpu", enable_timing=enable_timing)
        event._extension = extension
        event._timed = torch.Event("simgpu", enable_timing=True) if enable_timing else None
        return event

    def record(self, stream: torch.Stream | None = None) -> Self:
        for event in filter(None, (self._timed, self)):
            self._extension.record_event(event, stream or torch.accelerator.current_stream())
        return self

    def elapsed_time(self, end: _Event) -> float:
        return self._timed.elapsed_time(end._timed)  # torch takes no subclass's


class _OnDevice:
    """Makes a device the current one within a block."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)
