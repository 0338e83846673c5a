"""Streams, events and memory of the simulated device: a missing wait shows in the numbers, every time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import simgpu
import torch
from simulated_gpu import on_gpus, run_on_gpu

pytestmark = pytest.mark.usefixtures("simulated_gpu")


@pytest.mark.parametrize(("waits", "expected"), [(False, 0), (True, 1000)])
@on_gpus()
def test_read_on_another_stream_sees_new_values_if_it_waits(waits: bool, expected: float) -> None:
    writer, reader = torch.Stream("simgpu:0"), torch.Stream("simgpu:0")
    values = torch.zeros(1000, device="simgpu")
    torch.accelerator.synchronize()
    with simgpu.held(writer):
        with writer:
            values.fill_(1)
            written = writer.record_event()
        if waits:
            reader.wait_event(written)
        with reader:
            total = values.sum()
        if not waits:
            reader.synchronize()
    torch.accelerator.synchronize()  # also the writer, which may not outlive `values`
    assert float(total) == expected


@on_gpus()
def test_events_report_whether_and_when_work_is_done() -> None:
    stream = torch.accelerator.current_stream()
    first, last, untimed = (torch.Event("simgpu", enable_timing=timed) for timed in (True, True, False))
    stream.record_event(first)
    first.synchronize()
    simgpu.delays(operation_us=20_000)
    torch.ones(1, device="simgpu")
    with simgpu.held(stream):
        stream.record_event(last)
        stream.record_event(untimed)
        assert [first.query(), last.query(), stream.query()] == [True, False, False]
        with pytest.raises(RuntimeError, match=r"not ready|must be completed"):
            first.elapsed_time(last)
    last.synchronize()
    stream.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        first.elapsed_time(untimed)
    assert last.query()
    assert stream.query()
    assert first.elapsed_time(last) >= 10


@on_gpus()
def test_host_waits_are_counted_by_kind() -> None:
    stream = torch.accelerator.current_stream()
    values = torch.ones(4, device="simgpu")
    simgpu.reset_counts()
    event = stream.record_event()
    event.synchronize()
    stream.synchronize()
    torch.accelerator.synchronize()
    values.sum().item()
    values.cpu()
    values[values > 0]
    values.mul_(2).add_(1).softmax(0)
    counts = {name: count for name, count in simgpu.counts().items() if "wait" in name or "once" in name}
    kinds = ("stream", "event", "device", "item", "copy", "data-dependent operation")
    assert counts == {f"host wait: {kind}": 1 for kind in kinds}


@on_gpus()
def test_event_waits_report_how_much_work_was_queued() -> None:
    stream, side = torch.accelerator.current_stream(), torch.Stream("simgpu:0")
    values = torch.ones(4, device="simgpu")
    simgpu.reset_counts()
    first = stream.record_event()
    values.add_(1).mul_(2)
    last = stream.record_event()
    with side:
        values + 1
    for event in (last, first, torch.Event("simgpu")):
        event.synchronize()
    assert simgpu.event_waits() == [0, 2]


@on_gpus()
def test_failed_operation_surfaces_at_each_later_call() -> None:
    stream = torch.accelerator.current_stream()
    simgpu.launch_failing_operation(stream)
    for action in (stream.synchronize, torch.accelerator.synchronize, lambda: torch.ones(1, device="simgpu") + 1):
        with pytest.raises(RuntimeError, match="failing operation failed asynchronously: injected failure"):
            action()
    assert simgpu.counts()["failed operations"] == 1


@on_gpus()
def test_operations_take_at_least_half_the_delay() -> None:
    simgpu.delays(seed=1, operation_us=3000)
    stream = torch.accelerator.current_stream()
    events = [torch.Event("simgpu", enable_timing=True) for _ in range(9)]
    values = torch.ones(1, device="simgpu")
    for event in events:
        values.add_(1)
        stream.record_event(event)
    stream.synchronize()
    assert min(first.elapsed_time(last) for first, last in pairwise(events)) >= 1.5


@on_gpus()
def test_new_memory_is_poisoned() -> None:
    assert math.isnan(torch.empty(3, device="simgpu").sum())
    assert int(torch.empty(3, dtype=torch.int64, device="simgpu").sum()) == -3


@pytest.mark.parametrize(("records", "expected"), [(False, math.nan), (True, 1000.0)])
@on_gpus()
def test_memory_freed_too_early_is_poisoned(records: bool, expected: float) -> None:
    owner, reader = torch.accelerator.current_stream(), torch.Stream("simgpu:0")
    values = torch.ones(1000, device="simgpu")
    total = torch.zeros((), device="simgpu")
    reader.wait_stream(owner)
    with simgpu.held(reader):
        with reader:
            torch.sum(values, 0, out=total)
        if records:
            values.record_stream(reader)
        del values
        if not records:
            owner.synchronize()
    reader.synchronize()
    assert float(total) == pytest.approx(expected, nan_ok=True)


def _free_while_another_stream_writes(records: bool) -> None:
    values, writer = torch.ones(1000, device="simgpu"), torch.Stream("simgpu:0")
    with simgpu.held(writer):
        with writer:
            values.fill_(2)
        if records:
            values.record_stream(writer)
        del values
        if not records:
            torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()


def test_writes_to_freed_memory_fail_the_test() -> None:
    run_on_gpu(_free_while_another_stream_writes, True)
    with pytest.raises(AssertionError, match="memory was written to after it had been freed"):
        run_on_gpu(_free_while_another_stream_writes, False)


@pytest.mark.parametrize(("pinned", "expected"), [(True, "copies enqueued"), (False, "host wait: copy")])
@on_gpus()
def test_copy_from_pageable_memory_waits_from_pinned_not(pinned: bool, expected: str) -> None:
    stream = torch.accelerator.current_stream()
    source = torch.ones(4, pin_memory=pinned)
    target = torch.zeros(4, device="simgpu")
    stream.synchronize()
    simgpu.reset_counts()
    if pinned:
        with simgpu.held(stream):
            target.copy_(source, non_blocking=True)
            source.fill_(2)  # too early
    else:
        target.copy_(source, non_blocking=True)
        source.fill_(2)
    assert {name: count for name, count in simgpu.counts().items() if "cop" in name} == {expected: 1}
    assert target.tolist() == [2 if pinned else 1] * 4


@on_gpus()
def test_freed_pinned_memory_lasts_until_copied() -> None:
    stream = torch.accelerator.current_stream()
    target = torch.zeros(1000, device="simgpu")
    with simgpu.held(stream):
        source = torch.ones(1000).pin_memory()
        assert source.is_pinned()
        target.copy_(source, non_blocking=True)
        del source
        pinned = [torch.zeros(1000, pin_memory=True) for _ in range(4)]
    assert len(pinned) == 4
    assert target.unique().tolist() == [1]


@on_gpus()
def test_allocation_beyond_limit_is_out_of_memory() -> None:
    simgpu.limit_memory(torch.device("simgpu", 0), 1 << 20)
    kept = torch.ones(1 << 17, device="simgpu")
    for _ in range(20):
        torch.empty(1 << 16, device="simgpu")  # each is freed
    with pytest.raises(torch.OutOfMemoryError, match=r"^simgpu out of memory\. Tried to allocate 1048576 bytes\."):
        torch.empty(1 << 18, device="simgpu")
    assert torch.get_device_module("simgpu").memory_allocated() == 4 * kept.numel()


@on_gpus()
def test_freeing_shared_memory_blocks_no_stream() -> None:
    stream, other = torch.accelerator.current_stream(), torch.Stream(torch.device("simgpu", 0))
    with simgpu.held(other):
        lent = torch.ones(1000, device="simgpu")
        lent.record_stream(other)
        del lent
        stream.synchronize()
        assert not other.query()
