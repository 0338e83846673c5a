"""What the flags that choose a device and its library take. `lockstep.world.world.connect` acts on it."""

from __future__ import annotations

from typing import Literal

DeviceChoice = Literal["auto", "cpu", "gpu", "cuda", "xpu", "mps"]
"""What --device takes: "gpu" is the accelerator, of whatever kind."""
BackendChoice = Literal["auto", "gloo", "nccl", "xccl"]
"""What --dist-backend takes: "auto" is the device's own library, or Gloo for the CPU."""
