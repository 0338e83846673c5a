"""Each wait for a simulated GPU is needed: without it, these tests read numbers that are not there yet.

test_sabotage.py removes the waits, one at a time, and checks that a test fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus

from lockstep.data.loaders import prefetch
from lockstep.data.sets import Batch
from lockstep.hvd.elastic.commits import StateCopy
from lockstep.run.checkpoints.snapshot import HostCopies, TensorShard
from lockstep.world import accelerator
from lockstep.world.step_clock import DeviceClock

pytestmark = pytest.mark.usefixtures("simulated_gpu")

GPU = torch.device("privateuseone", 0)  # simgpu:0 in its processes
SLOW_US = 100_000  # longer than the host takes for anything in these tests


@pytest.mark.parametrize("changes", [False, True])
@on_gpus()
def test_a_snapshot_holds_the_state_of_its_step(changes: bool) -> None:
    copies = HostCopies(GPU)
    simgpu.delays(copy_us=SLOW_US, operation_us=SLOW_US)
    weight = torch.ones(4, device=GPU) + 1  # not computed yet
    own = {"weight": weight, "double": TensorShard(2 * weight, (8,), (4,), True)}
    with copies.making() as wait:
        state = copies.copy(own)
    del own  # the copies are under way
    if changes:
        copies.protect()
        weight.zero_()  # the next step
    wait()
    assert (state["weight"][0].item(), state["double"].tensor[0].item()) == (2, 4)


@on_gpus()
def test_a_commit_holds_the_state_of_its_step_on_the_host() -> None:
    simgpu.delays(copy_us=SLOW_US, operation_us=SLOW_US)
    weight = torch.ones(2, 3, 4, 4, device=GPU).to(memory_format=torch.channels_last) + 1  # not computed yet
    state = {"weight": weight, "parts": [weight, weight.sum()], "step": 3}
    memory = torch.get_device_module("simgpu")
    held_bytes = memory.memory_allocated()
    commit = StateCopy(state)
    assert memory.memory_allocated() == held_bytes
    weight.zero_()  # the next step
    restored = commit.restored()
    assert restored["parts"][0] is restored["weight"] is not weight
    assert (restored["weight"].stride(), restored["weight"].device) == (weight.stride(), weight.device)
    assert [each.sum().item() for each in restored["parts"]] == [192, 192]
    assert restored["step"] == 3


@on_gpus()
def test_prefetched_batches_are_whole_when_they_are_used() -> None:
    simgpu.delays(copy_us=SLOW_US // 10, operation_us=SLOW_US // 10)
    shift = torch.zeros(1, device=GPU)
    for _ in range(8):
        shift += 0.25  # on the training stream, later than the first batch is made

    def batches() -> Iterator[Batch]:
        for number in range(4):
            images = torch.full((64,), float(number)).pin_memory().to(GPU, non_blocking=True)
            yield Batch(images * shift, torch.tensor([number]).pin_memory().to(GPU, non_blocking=True))

    sums = []
    for batch in prefetch(batches(), GPU):
        images, labels = batch.images, batch.labels
        del batch
        total = images.sum() + labels.sum()
        del images, labels  # while the training stream has not used them
        sums.append(total)
    assert [total.item() for total in sums] == [number * 128 + number for number in range(4)]


@on_gpus()
def test_a_clock_reads_the_devices_time() -> None:
    clock = DeviceClock(GPU)
    start = clock.now()
    simgpu.delays(operation_us=SLOW_US)
    with simgpu.held(accelerator.current_stream(GPU)):
        torch.ones(1, device=GPU).add_(1)
        end = clock.now()
        was_reached = clock.is_reached(end)
    clock.wait_for(end)
    assert clock.seconds(start, end) >= SLOW_US / 2e6
    assert not was_reached


@on_gpus()
def test_a_side_stream_is_waited_for_on_the_device() -> None:
    torch.accelerator.set_device_index(1)
    side, before = accelerator.new_stream(GPU), accelerator.current_stream(GPU)
    with simgpu.held(side):
        with accelerator.on(side):
            value = torch.ones(1, device=GPU) + 1
        assert accelerator.current_stream(GPU) == before
        index = torch.accelerator.current_device_index()
        before.wait_stream(side)
        is_done = before.query()
    assert (index, is_done, value.item()) == (1, False, 2)
