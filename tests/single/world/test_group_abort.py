"""Aborting process groups: threads abort, and only the main thread changes torch's registry of groups."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist
from waiting import Lines

from lockstep.world.peer_loss import GroupAbort
from lockstep.world.world import disconnect

SECONDS = 60.0
REGISTRY = dist.distributed_c10d._world


class SlowGroup:
    """A group whose abort lasts until it is released."""

    def __init__(self) -> None:
        self.begun, self.released, self.has_ended = threading.Event(), threading.Event(), threading.Event()

    def abort(self) -> None:
        self.begun.set()
        assert self.released.wait(SECONDS)
        self.has_ended.set()


@pytest.fixture
def slow() -> Iterator[SlowGroup]:
    _connect()
    group = SlowGroup()
    REGISTRY.pg_names[group] = "slow"  # type: ignore[index]
    yield group
    group.released.set()
    disconnect()


def _connect() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _begun(slow: SlowGroup) -> GroupAbort:
    abort = GroupAbort(torch.device("cpu"))
    abort.seconds = abort.long_seconds = 0.01
    abort()
    assert slow.begun.is_set()
    return abort


def test_groups_of_the_next_generation_outlive_a_late_abort(slow: SlowGroup) -> None:
    abort = _begun(slow)
    del REGISTRY.pg_names[slow]  # type: ignore[arg-type]
    dist.destroy_process_group()
    _connect()
    slow.released.set()
    assert slow.has_ended.wait(SECONDS)
    assert abort._wait(SECONDS)
    assert dist.is_initialized()
    assert len(REGISTRY.pg_names) == 1


def test_groups_stay_registered_while_an_abort_runs(slow: SlowGroup) -> None:
    abort = _begun(slow)
    abort.drop_groups()
    assert dist.is_initialized()
    slow.released.set()
    abort.finish()
    assert slow.has_ended.is_set()
    assert not dist.is_initialized()


def test_a_worker_that_waits_for_an_abort_says_so(slow: SlowGroup) -> None:
    def release() -> None:
        lines.wait_for("lockstep: aborting the collectives takes longer than 0.01 s")
        slow.released.set()

    reading = threading.Thread(target=release)
    with redirect_stderr(Lines()) as lines:
        reading.start()
        _begun(slow).finish()
        reading.join()
    assert slow.has_ended.is_set()


def test_an_abort_happens_once_and_failures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def abort(self) -> None:
            raise RuntimeError("no abort here")

    _connect()
    REGISTRY.pg_names[Failing()] = "failing"  # type: ignore[index]
    abort = GroupAbort(torch.device("cpu"))
    abort()
    abort()
    abort.finish()
    assert capsys.readouterr().err.count("a process group cannot be aborted: no abort here") == 1
    assert not dist.is_initialized()
