"""What calls of hvd do with tensors of an accelerator, before they reach the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.hvd.engine.fusion import Allreduce
from lockstep.hvd.optimizer.buckets import Bucket, GradientSlot
from lockstep.hvd.optimizer.reductions import no_gradient
from lockstep.world import accelerator

META = torch.device("meta")


def test_no_gradient_of_a_sparse_parameter_is_on_its_device() -> None:
    parameter = nn.Parameter(torch.zeros(5, 3, device=META))
    gradient = no_gradient(GradientSlot("embedding", parameter, Bucket("bucket 0"), 1, sparse=True))
    assert gradient.device == META
    assert gradient._indices().device == META
    assert gradient._values().shape == (0, 3)


def test_capturing_a_graph_is_refused(accelerators: Callable[..., None]) -> None:
    accelerators(is_capturing=True)
    with pytest.raises(ValueError, match=r"allreduce\.w cannot be captured into a graph"):
        Allreduce("w", [torch.zeros(3, device=META)]).follow_stream()


@pytest.mark.parametrize("capturing", [True, False])
def test_stream_capture_is_recognized(device_module: Callable[..., None], capturing: bool) -> None:
    assert not accelerator.is_capturing(torch.device("cpu"))
    device_module(is_current_stream_capturing=lambda: capturing)
    assert accelerator.is_capturing(torch.device("cuda", 0)) is capturing


def test_joined_worker_without_a_gpu_is_reported() -> None:
    """Zeros on the CPU would be reduced by Gloo, and the other workers wait in NCCL for ever."""
    said: dict[str, Any] = Allreduce("w", [torch.zeros(3, device=META)]).describe()
    assert said["devices"] == ["GPU"]
    with pytest.raises(ValueError, match="has joined, has no GPU"):
        Allreduce.of_zeros(said, torch.device("cpu"))
