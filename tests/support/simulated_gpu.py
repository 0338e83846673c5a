"""Workers with simulated GPUs (tests/simgpu). Tests that use them ask for the fixture `simulated_gpu`."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from cold_starts import allowed

from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World, connect

sys.path.append(str(Path(__file__).parents[1]))  # last: the other folders of tests/ are not packages to import

import simgpu
from simgpu import build

_CONTEXT = multiprocessing.get_context("forkserver")
# Also what this module imports: each test starts from a fork of that process.
_CONTEXT.set_forkserver_preload(["torch._dynamo", "lockstep.train.run", "lockstep.hvd", "pytest", "cloudpickle"])


@pytest.fixture(scope="session")
def simulated_gpu() -> None:
    """Compile the simulated device, or take it from the cache; skip the test if this machine cannot compile it."""
    try:
        build.built()
    except simgpu.MissingCompilerError as error:
        pytest.skip(str(error))


def run_on_gpus(
    size: int, function: Callable[..., Any], *arguments: Any, devices: int = 2, sets_device: bool = True
) -> list[Any]:
    """Call `function(world, *arguments)` as `run_in_workers` does, where each worker has a simulated GPU.

    torch.accelerator, torch.distributed and autocast know it.

    Args:
        sets_device: Make the worker's own device the current one; otherwise that is device 0.
    """
    return _from_clean_process(size, _with_gpu, function, arguments, devices, sets_device)


def run_on_gpu(function: Callable[..., Any], *arguments: Any, devices: int = 2) -> Any:
    """Call `function(*arguments)` in a new process with simulated GPUs; return its result."""
    return _from_clean_process(1, _without_world, function, arguments, devices)[0]


def on_gpus(size: int = 1) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body in `size` processes with simulated GPUs, and require the same return value of all.

    The body gets its fixtures and parameters. A body whose first parameter is `world` runs in connected workers.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(body)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "world"]

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            values = [arguments[parameter.name] for parameter in own]
            is_connected = len(own) < len(signature.parameters)
            results = run_on_gpus(size, body, *values) if is_connected else [run_on_gpu(body, *values)]
            assert results == results[:1] * size

        vars(test)["__signature__"] = signature.replace(parameters=own)  # pytest's view of the test
        return test

    return decorate


@contextmanager
def gpu_world() -> Iterator[World]:
    """Connect this worker of `run_on_gpus` again as the trainer does: with its device, and the device's collectives."""
    dist.destroy_process_group()
    with connect(RankInfo.from_environment(), "gpu") as world:
        yield world


def _from_clean_process(size: int, wrapper: Callable[..., Any], function: Callable[..., Any], *rest: Any) -> list[Any]:
    """Run workers that are forked from another process than this one.

    Autograd refuses a device in a fork of a process that has run a backward pass, as other tests do in this one.
    """
    cloudpickle.register_pickle_by_value(sys.modules[function.__module__])  # a test module has no importable name
    work = cloudpickle.dumps((size, wrapper, function, *rest))
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    child = _CONTEXT.Process(target=_run_workers, args=(sender, sys.path, work))
    with allowed():
        child.start()
    sender.close()
    error, results = pickle.loads(receiver.recv_bytes())
    child.join()
    assert not error, error
    return [pickle.loads(result) for result in results]


def _run_workers(sender: Any, path: list[str], work: bytes) -> None:
    sys.path[:] = path
    from worker_group import run_in_workers  # imports torch._dynamo, 4 s, which conftest must not

    outcome: tuple[str, list[bytes]] = "", []
    try:
        outcome = "", run_in_workers(*pickle.loads(work))
    except BaseException as error:
        outcome = str(error) or repr(error), []
    sender.send_bytes(pickle.dumps(outcome))


def _with_gpu(
    world: World, function: Callable[..., Any], arguments: tuple[Any, ...], devices: int, sets_device: bool
) -> bytes:
    simgpu.install(devices)
    if sets_device:
        torch.accelerator.set_device_index(world.rank % devices)
    return _checked(function(world, *arguments))


def _without_world(_: World, function: Callable[..., Any], arguments: tuple[Any, ...], devices: int) -> bytes:
    simgpu.install(devices)
    return _checked(function(*arguments))


def _checked(result: Any) -> bytes:
    failure = simgpu.unreported_failure()
    assert not failure, failure
    assert not simgpu.late_writes(), "memory was written to after it had been freed"
    return cloudpickle.dumps(result)  # with the classes of the test module
