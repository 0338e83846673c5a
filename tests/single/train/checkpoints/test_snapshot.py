"""Copies of a state on the host. tests/parallel/simgpu shows that they hold the state of their step."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import simgpu
import torch
from simulated_gpu import run_on_gpu

from lockstep.train.checkpoints.snapshot import HostCopies

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes


def test_without_streams_a_state_is_copied_at_once() -> None:
    copies = HostCopies(torch.device("cpu"))
    weight = torch.arange(6.0).view(2, 3).t()
    buffers = copies.steady({"count": weight})
    assert buffers["count"] is weight
    with copies.making() as wait:
        state = copies.copy((weight,))
    weight.zero_()
    wait()
    assert state[0].is_contiguous()
    assert state[0].tolist() == [[0, 3], [1, 4], [2, 5]]


def _copy_with_little_memory() -> tuple[dict[str, int], list[float]]:
    psutil.virtual_memory = lambda: SimpleNamespace(available=4 * 2 * 1024)
    copies = HostCopies(GPU, workers=2)  # 1 KiB for each
    state = [torch.full((100,), float(number), device=GPU) for number in range(4)]  # 400 bytes: torch pins 512
    simgpu.reset_counts()
    with copies.making() as wait:
        made = copies.copy({"weights": state, "step": 3})
    counts = {name: count for name, count in simgpu.counts().items() if "cop" in name}
    wait()
    return counts, [tensor[0].item() for tensor in made["weights"]] + [made["step"]]


@pytest.mark.usefixtures("simulated_gpu")
def test_state_is_pinned_up_to_a_share_of_free_memory() -> None:
    assert run_on_gpu(_copy_with_little_memory) == ({"copies enqueued": 2, "host wait: copy": 2}, [0, 1, 2, 3, 3])
