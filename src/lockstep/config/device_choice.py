"""The values of --device and --dist-backend; `lockstep.world.world.connect` applies them."""

from __future__ import annotations

from typing import Literal

DeviceChoice = Literal["auto", "cpu", "gpu", "cuda", "xpu", "mps"]
"""Values of --device; "gpu" is any kind of accelerator."""
BackendChoice = Literal["auto", "gloo", "nccl", "xccl"]
"""Values of --dist-backend; "auto" is the accelerator's library, or Gloo for the CPU."""
