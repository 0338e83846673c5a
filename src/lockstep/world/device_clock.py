"""Timestamps: from the CPU clock, or from events in the current stream of a device with streams."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lockstep.world import accelerator

if TYPE_CHECKING:
    import torch


class DeviceClock:
    """Times the work of a device without blocking the host."""

    def __init__(self, device: torch.device):
        self._device = device
        self._has_streams = accelerator.overlaps(device)

    def now(self) -> Any:
        """Return a timestamp after all work submitted to the device so far."""
        if not self._has_streams:
            return time.perf_counter()
        event = accelerator.new_event(self._device, timing=True)
        accelerator.current_stream(self._device).record_event(event)
        return event

    def wait_for(self, timestamp: Any) -> None:
        """Wait until the device has reached a timestamp."""
        if self._has_streams:
            timestamp.synchronize()

    @property
    def has_time(self) -> bool:
        """Whether timestamps can be taken now: not while the current stream is capturing a graph."""
        return not (self._has_streams and accelerator.is_capturing(self._device))

    def is_reached(self, timestamp: Any) -> bool:
        """Whether the device has reached a timestamp."""
        return not self._has_streams or bool(timestamp.query())

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two timestamps, both of which the device has reached."""
        return float(start.elapsed_time(end)) / 1000 if self._has_streams else float(end - start)
