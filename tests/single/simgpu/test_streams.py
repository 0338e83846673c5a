"""Streams, events and memory of the simulated device: a missing wait shows in the numbers, every time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import simgpu
import torch
from simulated_gpu import run_on_gpu

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _read_on_another_stream(waits: bool) -> float:
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
    reader.synchronize()
    return float(total)


def test_read_without_wait_sees_old_values() -> None:
    assert run_on_gpu(_read_on_another_stream, False) == 0


def test_read_after_wait_sees_new_values() -> None:
    assert run_on_gpu(_read_on_another_stream, True) == 1000


def _events() -> tuple[list[bool], float]:
    stream = torch.accelerator.current_stream()
    first, last, untimed = (torch.Event("simgpu", enable_timing=timed) for timed in (True, True, False))
    stream.record_event(first)
    first.synchronize()
    simgpu.delays(operation_us=20_000)
    torch.ones(1, device="simgpu")
    with simgpu.held(stream):
        stream.record_event(last)
        stream.record_event(untimed)
        queries = [first.query(), last.query(), stream.query()]
        with pytest.raises(RuntimeError, match=r"not ready|must be completed"):
            first.elapsed_time(last)
    last.synchronize()
    stream.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        first.elapsed_time(untimed)
    return [*queries, last.query(), stream.query()], first.elapsed_time(last)


def test_events_report_whether_and_when_work_is_done() -> None:
    queries, milliseconds = run_on_gpu(_events)
    assert queries == [True, False, False, True, True]
    assert milliseconds >= 10


def _host_waits() -> dict[str, int]:
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
    return {name: count for name, count in simgpu.counts().items() if "wait" in name or "once" in name}


def test_host_waits_are_counted_by_kind() -> None:
    kinds = ("stream", "event", "device", "item", "copy", "data-dependent operation")
    assert run_on_gpu(_host_waits) == {f"host wait: {kind}": 1 for kind in kinds}


def _wait_for_events() -> list[int]:
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
    return simgpu.event_waits()


def test_event_waits_report_how_much_work_was_queued() -> None:
    assert run_on_gpu(_wait_for_events) == [0, 2]


def _fail() -> tuple[list[str], int]:
    stream = torch.accelerator.current_stream()
    errors = []
    simgpu.launch_failing_operation(stream)
    for action in (stream.synchronize, torch.accelerator.synchronize, lambda: torch.ones(1, device="simgpu") + 1):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))
    return errors, simgpu.counts()["failed operations"]


def test_failed_operation_surfaces_at_each_later_call() -> None:
    errors, count = run_on_gpu(_fail)
    assert len(errors) == 3
    assert all("failing operation failed asynchronously: injected failure" in error for error in errors)
    assert count == 1


def _delays_of_operations() -> list[float]:
    simgpu.delays(seed=1, operation_us=3000)
    stream = torch.accelerator.current_stream()
    events = [torch.Event("simgpu", enable_timing=True) for _ in range(9)]
    values = torch.ones(1, device="simgpu")
    for event in events:
        values.add_(1)
        stream.record_event(event)
    stream.synchronize()
    return [first.elapsed_time(last) for first, last in pairwise(events)]


def test_operations_take_at_least_half_the_delay() -> None:
    assert min(run_on_gpu(_delays_of_operations)) >= 1.5


def _new_memory() -> list[float]:
    return [
        float(torch.empty(3, device="simgpu").sum()),
        float(torch.empty(3, dtype=torch.int64, device="simgpu").sum()),
    ]


def test_new_memory_is_poisoned() -> None:
    number, integer = run_on_gpu(_new_memory)
    assert math.isnan(number)
    assert integer == -3


def _free_while_another_stream_reads(records: bool) -> float:
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
    return float(total)


def test_memory_freed_too_early_is_poisoned() -> None:
    assert math.isnan(run_on_gpu(_free_while_another_stream_reads, False))


def test_record_stream_keeps_memory_for_readers() -> None:
    assert run_on_gpu(_free_while_another_stream_reads, True) == 1000


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


def _copy(pinned: bool) -> tuple[list[float], dict[str, int]]:
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
    counts = {name: count for name, count in simgpu.counts().items() if "cop" in name}
    return target.tolist(), counts


def test_copy_from_pinned_memory_does_not_wait() -> None:
    assert run_on_gpu(_copy, True) == ([2, 2, 2, 2], {"copies enqueued": 1})


def test_copy_from_pageable_memory_waits() -> None:
    assert run_on_gpu(_copy, False) == ([1, 1, 1, 1], {"host wait: copy": 1})


def _free_pinned_source() -> list[float]:
    stream = torch.accelerator.current_stream()
    target = torch.zeros(1000, device="simgpu")
    with simgpu.held(stream):
        source = torch.ones(1000).pin_memory()
        assert source.is_pinned()
        target.copy_(source, non_blocking=True)
        del source
        pinned = [torch.zeros(1000, pin_memory=True) for _ in range(4)]
    assert len(pinned) == 4
    return target.unique().tolist()


def test_freed_pinned_memory_lasts_until_copied() -> None:
    assert run_on_gpu(_free_pinned_source) == [1]


def _exceed_the_limit() -> tuple[str, int]:
    simgpu.limit_memory(torch.device("simgpu", 0), 1 << 20)
    kept = torch.ones(1 << 17, device="simgpu")
    for _ in range(20):
        torch.empty(1 << 16, device="simgpu")  # each is freed
    try:
        torch.empty(1 << 18, device="simgpu")
    except torch.OutOfMemoryError as error:
        return str(error), torch.get_device_module("simgpu").memory_allocated() - 4 * kept.numel()
    return "no error", 0


def test_allocation_beyond_limit_is_out_of_memory() -> None:
    message, other_bytes = run_on_gpu(_exceed_the_limit)
    assert message.startswith("simgpu out of memory. Tried to allocate 1048576 bytes.")
    assert other_bytes == 0


def _free_lent_memory() -> bool:
    stream, other = torch.accelerator.current_stream(), torch.Stream(torch.device("simgpu", 0))
    with simgpu.held(other):
        lent = torch.ones(1000, device="simgpu")
        lent.record_stream(other)
        del lent
        stream.synchronize()
        return not other.query()


def test_freeing_shared_memory_blocks_no_stream() -> None:
    assert run_on_gpu(_free_lent_memory)
