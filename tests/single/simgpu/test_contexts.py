"""Which devices a process has touched, and processes that are forked from one that has."""

from __future__ import annotations

import os

import pytest
import simgpu
import torch
from simulated_gpu import run_on_gpu

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _touch() -> list[set[int]]:
    seen = [simgpu.contexts()]
    values = torch.ones(2, device="simgpu:1")
    (values * 2).sum().item()
    seen.append(simgpu.contexts())
    event = torch.Event("simgpu:1")
    torch.accelerator.current_stream(1).record_event(event)
    seen.append(simgpu.contexts())
    return seen


def test_operations_touch_only_the_device_of_their_tensors() -> None:
    before, after_operations, _ = run_on_gpu(_touch)
    assert before == set()
    assert after_operations == {1}


def test_event_of_another_device_touches_the_current_one() -> None:
    assert run_on_gpu(_touch)[2] == {0, 1}


def _set_the_device() -> tuple[set[int], int]:
    torch.accelerator.set_device_index(1)
    (torch.ones(2, device="simgpu", requires_grad=True) * 2).sum().backward()
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    del event
    return simgpu.contexts(), simgpu.counts()["events used by a thread on another device"]


def test_process_that_sets_its_device_touches_no_other() -> None:
    assert run_on_gpu(_set_the_device) == ({1}, 0)


def _fork_after_use() -> int:
    torch.ones(1, device="simgpu")
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="simgpu")
        except RuntimeError as error:
            os._exit(7 if "forked subprocess" in str(error) else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_child_of_a_user_cannot_use_the_device() -> None:
    assert run_on_gpu(_fork_after_use) == 7
