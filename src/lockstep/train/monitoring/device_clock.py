"""Marks in time: by the processor's clock, or on a device with streams by events in the current one."""

from __future__ import annotations

import time
from typing import Any

import torch

from lockstep.world import accelerator


class DeviceClock:
    """Times what a device does; the host, which is ahead of it, does not wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._has_streams = accelerator.overlaps(device)

    def now(self) -> Any:
        """A mark behind what the device was asked for so far."""
        if not self._has_streams:
            return time.perf_counter()
        event = accelerator.new_event(self._device, timing=True)
        accelerator.current_stream(self._device).record_event(event)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another, both of which the device has reached."""
        return float(start.elapsed_time(end)) / 1000 if self._has_streams else float(end - start)
