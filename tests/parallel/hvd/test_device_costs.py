"""What a training step costs on an accelerator: calls of its library, launches and memory, counted on a simulated one.

The model is ResNet-50, whose gradients are 97.5 MiB, on two workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import fake_accelerator as fake
import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torchvision.models import resnet50
from worker_group import run_in_workers

from lockstep import hvd
from lockstep.hvd.engine.exchange import BUFFER_BYTES
from lockstep.world.world import World

DDP_BUCKET_BYTES = 25 << 20  # the default of DistributedDataParallel's bucket_cap_mb
STRIDED = 17  # parameters whose memory channels_last rearranges: convolutions of 7x7 and 3x3
FP16 = {"compression": hvd.Compression.fp16}


@dataclass
class Costs:
    """Of one step."""

    operations: list[str]  # of the library's all-reduces
    dtypes: set[torch.dtype]
    elements: int  # reduced
    launches: dict[str, int]  # of the engine: names and numbers of operations
    script_launches: dict[str, int]
    peak_bytes: int  # the engine's
    held_bytes: int  # the engine's, after the step
    script_peak_bytes: int
    script_held_bytes: int  # after zero_grad
    lent: int  # tensors that the allocator keeps until another stream's work is done


def train(world: World, arguments: dict[str, Any], averages: bool, channels_last: bool) -> list[Costs]:
    """Return the costs of the steps after the first one."""
    machine = fake.install()
    machine.averages = averages
    hvd.init()
    steps = []
    with fake.Watch(machine):
        with fake.DEVICE:
            model = resnet50()
            images = torch.zeros(2, 3, 64, 64)
        if channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **arguments)
        for step in range(3):
            machine.launches.clear()
            machine.peak_bytes.clear()
            machine.lent = 0
            for group in machine.groups:
                group.reductions.clear()
            model(images).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            hvd.barrier()  # after it, the engine's thread has left the last round
            if step > 0:
                steps.append(_costs(machine))
        hvd.barrier()  # the shutdown of a worker releases the buffers of all
    hvd.shutdown()
    assert machine.faults == []
    return steps


def _costs(machine: fake.Machine) -> Costs:
    (group,) = machine.groups
    script, library = machine.default.number, group.stream.number
    engine = [stream.number for stream in machine.streams if stream.number not in (script, library)]
    assert [machine.streams[number - 1].urgent for number in engine] == [True]
    return Costs(
        ["AVG" if operation == ReduceOp.AVG else "SUM" for operation, _, _ in group.reductions],
        {dtype for _, dtype, _ in group.reductions},
        sum(elements for _, _, elements in group.reductions),
        dict(sum((machine.launches[number] for number in engine), Counter[str]())),
        dict(machine.launches[script]),
        sum(machine.peak_bytes[number] for number in engine),
        sum(machine.live_bytes[number] for number in engine),
        machine.peak_bytes[script],
        machine.live_bytes[script],
        machine.lent,
    )


def parameters() -> list[torch.Tensor]:
    with torch.device("meta"):
        return list(resnet50().parameters())


def ddp_calls() -> int:
    """Return the number of DistributedDataParallel's buckets, from its second step on."""
    ready = parameters()[::-1]
    return len(dist._compute_bucket_assignment_by_size(ready, [dist._DEFAULT_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES])[0])


def costs(arguments: dict[str, Any], averages: bool = True, channels_last: bool = False) -> Costs:
    """Return the costs of a step, after checking that they do not depend on the worker and the step."""
    first, *others = chain.from_iterable(run_in_workers(2, train, arguments, averages, channels_last))
    assert others == [first] * 3
    result: Costs = first
    return result


@pytest.mark.parametrize("averages", [True, False])
def test_a_step_makes_at_most_one_call_more_than_ddp_and_two_or_three_launches_a_call(averages: bool) -> None:
    found = costs({}, averages)
    calls = len(found.operations)
    assert calls <= ddp_calls() + 1
    assert found.elements == sum(parameter.numel() for parameter in parameters())
    assert set(found.operations) == {"AVG" if averages else "SUM"}
    divisions = {} if averages else {"div_.Tensor": calls}
    assert found.launches == {"cat.out": calls, "_foreach_copy_.default": calls} | divisions


@pytest.mark.parametrize("channels_last", [False, True])
def test_conversion_takes_no_launch_of_its_own(channels_last: bool) -> None:
    plain, converted = costs({}, channels_last=channels_last), costs(FP16, channels_last=channels_last)
    calls = len(plain.operations)
    assert len(converted.operations) == calls
    assert converted.dtypes == {torch.float16}
    copies = {"copy_.default": 2 * STRIDED} if channels_last else {}
    assert converted.launches == {"_foreach_copy_.default": 2 * calls} | copies
    assert converted.script_launches == plain.script_launches
    assert converted.script_peak_bytes == plain.script_peak_bytes


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("arguments", [{}, FP16, {"groups": 1}], ids=["plain", "fp16", "one group"])
def test_the_engine_needs_one_buffer_of_limited_size_and_no_other_memory(
    arguments: dict[str, Any], channels_last: bool
) -> None:
    found = costs(arguments, channels_last=channels_last)
    gradients_bytes = sum(parameter.nbytes for parameter in parameters())
    with torch.device("meta"):
        model = resnet50()
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert 0 < found.held_bytes <= BUFFER_BYTES < gradients_bytes / 3
    assert found.peak_bytes in (0, found.held_bytes)  # nothing is allocated after the first step
    assert found.script_held_bytes - state_bytes < 1 << 20  # gradients are released
    assert found.lent == 0
