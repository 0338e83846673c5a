"""Which devices a process has touched, and processes that are forked from one that has."""

from __future__ import annotations

import os

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus

pytestmark = pytest.mark.usefixtures("simulated_gpu")


@on_gpus()
def test_operations_touch_only_the_device_of_their_tensors() -> None:
    assert simgpu.contexts() == set()
    (torch.ones(2, device="simgpu:1") * 2).sum().item()
    assert simgpu.contexts() == {1}
    event = torch.Event("simgpu:1")
    torch.accelerator.current_stream(1).record_event(event)
    assert simgpu.contexts() == {0, 1}  # an event touches the current device, too


@on_gpus()
def test_process_that_sets_its_device_touches_no_other() -> None:
    torch.accelerator.set_device_index(1)
    (torch.ones(2, device="simgpu", requires_grad=True) * 2).sum().backward()
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    del event
    assert simgpu.contexts() == {1}
    assert simgpu.counts()["events used by a thread on another device"] == 0


@on_gpus()
def test_forked_child_of_a_user_cannot_use_the_device() -> None:
    torch.ones(1, device="simgpu")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="simgpu")
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
