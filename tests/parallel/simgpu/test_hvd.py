"""hvd on simulated GPUs: operations in the order of streams, and one device for each worker."""

from __future__ import annotations

import logging

import pytest
import simgpu
import torch
from kept_lines import KeptLines
from simulated_gpu import on_gpus, run_on_gpus
from torch import nn

from lockstep import hvd
from lockstep.world import accelerator
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _train_without_setting_the_device(world: World) -> tuple[set[int], list[str], float]:
    kept = KeptLines()
    logging.getLogger("lockstep.hvd").addHandler(kept)
    hvd.init()
    device = torch.device("simgpu", hvd.local_rank())
    model = nn.Linear(4, 1).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
    weight = model.weight.sum().item()
    hvd.shutdown()
    return simgpu.contexts(), kept.lines, weight


def test_a_worker_uses_its_own_gpu_alone() -> None:
    (first, none, weight), (second, lines, same) = run_on_gpus(2, _train_without_setting_the_device, sets_device=False)
    assert weight == same
    assert (first, none) == ({0}, [])
    assert second == {1}
    assert [line.partition(",")[0] for line in lines] == ["the current device was simgpu:0"]


@on_gpus(2)
def test_a_worker_that_joins_first_uses_its_own_gpu_alone(world: World) -> None:
    hvd.init()
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.ones(1, device="simgpu:0"), op=hvd.Sum, name="late").item() == 1
    hvd.join()
    hvd.shutdown()
    assert simgpu.contexts() == {world.rank}


@pytest.mark.parametrize("reads_elsewhere", [False, True])
@on_gpus(2)
def test_reductions_follow_the_streams_that_write_and_read(world: World, reads_elsewhere: bool) -> None:
    hvd.init()
    device = torch.device("simgpu", hvd.local_rank())
    hvd.allreduce(torch.ones(1, device=device), name="connect")
    reader = accelerator.new_stream(device) if reads_elsewhere else accelerator.current_stream(device)
    totals = []
    for number in range(3):
        simgpu.delays(operation_us=20_000, collective_us=200_000)
        value = torch.ones(64, device=device) + number  # not computed when hvd is called
        handle = hvd.allreduce_async(value, op=hvd.Sum, name="late")
        with accelerator.on(reader):
            result = hvd.synchronize(handle)
            total = result * 2
            del value, handle, result  # before they are sent and read
            totals.append(total)
        simgpu.delays()
    reader.synchronize()
    assert [total.sum().item() for total in totals] == [256 * (1 + number) for number in range(3)]
    hvd.shutdown()
    assert (simgpu.counts()["groups shut down"], simgpu.counts()["groups aborted"]) == (1, 0)


@on_gpus(2)
def test_a_forgotten_reduction_writes_to_no_freed_gradient(world: World) -> None:
    """The decorator fails after late writes."""
    hvd.init()
    device = torch.device("simgpu", hvd.local_rank())
    model = nn.Linear(64, 1).to(device)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())
    hvd.allreduce(torch.ones(1, device=device), name="connect")
    simgpu.delays(collective_us=200_000)
    model(torch.ones(2, 64, device=device)).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())  # forgets the reductions
    optimizer.zero_grad()  # frees the gradients
    hvd.allreduce(torch.ones(1, device=device), name="after")
    torch.accelerator.synchronize()
    hvd.shutdown()
