"""What the accelerator's module decides, without one."""

from __future__ import annotations

import pytest
import torch

from lockstep.world import accelerator


@pytest.mark.parametrize(
    ("kind", "deterministic", "hip", "expected"),
    [
        ("cuda", False, None, True),
        ("cuda", True, None, False),
        ("cuda", False, "6.4", False),  # ROCm
        ("xpu", False, None, False),
        ("cpu", False, None, False),
    ],
)
def test_cudnn_times_its_kernels_unless_torch_is_deterministic(
    kind: str, deterministic: bool, hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    accelerator.tune(torch.device(kind, 0))
    assert torch.backends.cudnn.benchmark is expected
