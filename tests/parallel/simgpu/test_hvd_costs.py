"""What reducing ResNet-50's gradients, 97.5 MiB, costs in each step: collectives, launches and memory of the GPU."""

from __future__ import annotations

import gc
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import simgpu
import torch
import torch.distributed as dist
from simulated_gpu import run_on_gpus
from torch import nn
from torchvision.models import resnet50

from lockstep import hvd
from lockstep.hvd.engine.transfers import BUFFER_BYTES
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")

DDP_BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel's bucket_cap_mb
STRIDED = 17  # parameters whose memory channels_last rearranges: convolutions of 7x7 and 3x3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, channels_last": {},
    "fp16, channels_last": {"compression": hvd.Compression.fp16},
    "one group": {"groups": 1},
}
SUM = 0  # its number in torch.distributed.ReduceOp
ALL_REDUCE = re.compile(r"ALLREDUCE \d+ of (\d+) elements of (\w+) with operation (\d+)")


@dataclass
class Costs:
    """Of one step.

    Attributes:
        reductions: Elements, dtype and operation of each all-reduce of the library, in any order.
        launches: Numbers of operations on the engine's stream.
        script_launches: The same on the script's stream.
        peak_bytes: The most memory allocated at a time, and that after the step.
        lent: Tensors that the allocator keeps until another stream has used them.
    """

    reductions: list[tuple[int, str, int]]
    launches: dict[str, int]
    script_launches: dict[str, int]
    peak_bytes: int
    held_bytes: int
    lent: int


def _model(settings: str) -> nn.Module:
    with torch.device("meta"):
        model = resnet50()
    if "channels_last" in settings:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to_empty(device=torch.accelerator.current_accelerator())


def _backward(model: nn.Module) -> None:
    """Compute a gradient for each parameter, the last one first, with its strides."""
    torch.stack([parameter.sum() for parameter in model.parameters()]).sum().backward()


def _measure(optimizer: Any, model: nn.Module) -> Costs:
    """Return the costs of the second step, when buffers and buckets have their final sizes."""
    memory = torch.get_device_module("simgpu")
    for _ in range(2):
        hvd.barrier()  # after it, the engine's thread has left the last round
        torch.accelerator.synchronize()
        memory.reset_peak_memory_stats()
        simgpu.reset_counts()
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
    hvd.barrier()
    torch.accelerator.synchronize()
    held_bytes, lent, launches = memory.memory_allocated(), simgpu.counts()["streams recorded"], simgpu.launches()
    hvd.barrier()  # the shutdown of a worker releases the buffers of all
    script = launches.pop(0)
    calls = [ALL_REDUCE.fullmatch(name) for names in launches.values() for name in names]
    engine = [names for names in launches.values() if not any(map(ALL_REDUCE.fullmatch, names))]
    return Costs(
        sorted((int(call[1]), call[2], int(call[3])) for call in calls if call),
        dict(sum(engine, Counter[str]())),
        dict(script),
        memory.max_memory_allocated(),
        held_bytes,
        lent,
    )


def _measure_all(world: World) -> dict[str, tuple[Costs, Costs]]:
    """Return the costs with each of SETTINGS, and those of the same step without hvd."""
    costs, alone = {}, dict[bool, Costs]()
    for settings, options in SETTINGS.items():
        hvd.init()
        model = _model(settings)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = "channels_last" in settings
        if layout not in alone:
            alone[layout] = _measure(plain, model)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
        costs[settings] = _measure(optimizer, model), alone[layout]
        hvd.shutdown()
        del model, plain, optimizer
        gc.collect()
    return costs


@pytest.fixture(scope="module")
def costs(simulated_gpu: None) -> dict[str, tuple[Costs, Costs]]:
    first, second = run_on_gpus(2, _measure_all)
    assert first == second
    result: dict[str, tuple[Costs, Costs]] = first
    return result


def _parameters() -> list[torch.Tensor]:
    with torch.device("meta"):
        return list(resnet50().parameters())


def _ddp_calls() -> int:
    """Return the number of DistributedDataParallel's buckets, from its second step on."""
    ready = _parameters()[::-1]
    return len(dist._compute_bucket_assignment_by_size(ready, [dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES])[0])


def test_step_makes_one_call_more_than_ddp_and_few_launches(costs: dict[str, tuple[Costs, Costs]]) -> None:
    step, _ = costs["plain"]
    calls = len(step.reductions)
    assert calls <= _ddp_calls() + 1
    assert sum(elements for elements, _, _ in step.reductions) == sum(map(torch.numel, _parameters()))
    assert {dtype for _, dtype, _ in step.reductions} == {"Float"}
    assert {operation for _, _, operation in step.reductions} == {SUM}
    assert step.launches == {"aten::cat": calls, "aten::_foreach_copy_": calls, "aten::div": calls}


def test_conversion_takes_no_launch_of_its_own(costs: dict[str, tuple[Costs, Costs]]) -> None:
    (plain, _), (converted, _) = costs["plain, channels_last"], costs["fp16, channels_last"]
    assert [elements for elements, _, _ in converted.reductions] == [elements for elements, _, _ in plain.reductions]
    assert {dtype for _, dtype, _ in converted.reductions} == {"Half"}
    calls = len(plain.reductions)
    conversions = {"aten::_foreach_copy_": 2 * calls, "copy": 2 * STRIDED}
    assert converted.launches == conversions | {"aten::div": calls}
    assert converted.script_launches == plain.script_launches


def test_engine_needs_one_buffer_of_limited_size(costs: dict[str, tuple[Costs, Costs]]) -> None:
    gradients_bytes = sum(parameter.nbytes for parameter in _parameters())
    for step, alone in costs.values():
        buffer_bytes = step.held_bytes - alone.held_bytes
        assert 0 < buffer_bytes <= BUFFER_BYTES < gradients_bytes / 3
        assert step.peak_bytes == alone.peak_bytes + buffer_bytes
        assert step.lent == 0
        assert step.script_launches == alone.script_launches
