"""Workers with simulated GPUs (tests/simgpu). Tests that use them ask for the fixture `simulated_gpu`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.world.world import World

sys.path.append(str(Path(__file__).parents[1]))  # last: the other folders of tests/ are not packages to import

import simgpu
from simgpu import build


@pytest.fixture(scope="session")
def simulated_gpu() -> None:
    """Compile the simulated device, or take it from the cache; skip the test if this machine cannot compile it."""
    try:
        build.built()
    except simgpu.MissingCompilerError as error:
        pytest.skip(str(error))


def run_on_gpus(size: int, function: Callable[..., Any], *arguments: Any, devices: int = 2) -> list[Any]:
    """Call `function(world, *arguments)` as `run_in_workers` does, where each worker has a simulated GPU.

    The current device is the worker's own, and torch.accelerator, torch.distributed and autocast know it.
    """
    from worker_group import run_in_workers  # imports torch._dynamo, 4 s, which conftest must not

    return run_in_workers(size, _with_gpu, function, arguments, devices)


def run_on_gpu(function: Callable[..., Any], *arguments: Any, devices: int = 2) -> Any:
    """Call `function(*arguments)` in a new process with simulated GPUs; return its result."""
    from worker_group import run_in_workers

    return run_in_workers(1, _without_world, function, arguments, devices)[0]


def _with_gpu(world: World, function: Callable[..., Any], arguments: tuple[Any, ...], devices: int) -> Any:
    simgpu.install(devices)
    torch.accelerator.set_device_index(world.rank % devices)
    return _checked(function(world, *arguments))


def _without_world(_: World, function: Callable[..., Any], arguments: tuple[Any, ...], devices: int) -> Any:
    simgpu.install(devices)
    return _checked(function(*arguments))


def _checked(result: Any) -> Any:
    failure = simgpu.unreported_failure()
    assert not failure, failure
    return result
