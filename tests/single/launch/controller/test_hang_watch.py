"""When a hang is explained, and when it ends the job, with hosts that only answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.diagnosis.board import FINISHED, HVD, JOINING, TORCH_GROUP, TRAINER
from lockstep.diagnosis.flight_recorder import RecordedCollective
from lockstep.diagnosis.inspection import WorkerState
from lockstep.errors import HangError
from lockstep.launch.controller.hang_watch import HangWatch
from lockstep.launch.controller.job_outcome import Failure
from lockstep.launch.protocol.messages import Inspected, PeersLeft

PENDING = (RecordedCollective("0", 9, "all_reduce", "float[3]", False),)


class Host:
    """A node process that stands still from the start."""

    def __init__(self, *states: WorkerState, idle_s: float = 300.0, finished: tuple[int, ...] = ()) -> None:
        self.no_progress, self.progressing = asyncio.Event(), asyncio.Event()
        self.no_progress.set()
        self.end: asyncio.Future[None]
        self.idle_s = idle_s
        self.states = self.glance = states
        self.left = PeersLeft(finished)
        self.asked = 0
        self.node = SimpleNamespace(host="node")

    async def inspect(self) -> Inspected:
        self.asked += 1
        return Inspected(self.states)


class Silent(Host):
    """One whose first inspections fail."""

    def __init__(self, *states: WorkerState, failures: int = 2) -> None:
        super().__init__(*states)
        self.failures = failures

    async def inspect(self) -> Inspected:
        found = await super().inspect()
        return found if self.asked > self.failures else Inspected((), "no answer within 10 s")


def worker(rank: int, flags: int, waits: bool, **facts: Any) -> WorkerState:
    return WorkerState(rank, 100 + rank, state="S", flags=flags, collectives=PENDING if waits else (), **facts)


def outcome(hosts: Sequence[Host], ends: bool = False) -> Failure | None:
    """What the watch returns; None if it still watches when nothing is left to do."""

    async def watch() -> Failure | None:
        for host in hosts:
            host.end = asyncio.get_running_loop().create_future()
            if not host.states:
                host.end.set_result(None)
        watch = HangWatch(hosts, ends, lambda rank: f"host{rank}", settle=0.0)  # type: ignore[arg-type]
        watching = asyncio.create_task(watch.run())
        for _ in range(100):  # far more turns of the loop than it needs: nothing here takes time
            await asyncio.sleep(0)
        hang = watching.result() if watching.done() else None
        assert not hang or watch.hangs[-1].culprits[0] == hang.rank
        watching.cancel()
        return hang

    return asyncio.run(watch())


@pytest.mark.parametrize(("flags", "ends", "code"), [(TRAINER, False, 8), (TORCH_GROUP, True, 8), (HVD, True, 8)])
def test_a_hang_ends_a_training_and_any_job_with_the_flag(
    capsys: pytest.CaptureFixture[str], flags: int, ends: bool, code: int
) -> None:
    hang = outcome([Host(worker(0, flags, True)), Host(worker(1, flags, False, phase="forward"))], ends)
    assert hang
    assert (hang.rank, hang.host, hang.code) == (1, "host1", code)
    assert code == HangError.exit_code
    assert hang.describe(2) == "lockstep: the job hung; all workers were stopped"
    printed = capsys.readouterr().err
    assert (
        "rank 1 (host host1) has not entered all_reduce #9 of float[3]; rank 0 has waited for it for 300 s" in printed
    )
    assert "--hang-timeout" not in printed


def test_another_program_is_reported_on_once_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [Host(worker(0, HVD, True), worker(1, HVD, False))]
    assert outcome(hosts) is None
    printed = capsys.readouterr().err
    assert printed.count("has not entered") == 1
    assert "the job continues to wait; --hang-timeout SECONDS would end it" in printed
    assert hosts[0].asked == 1


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_wait_for_a_worker_that_exited_with_0_is_ended(
    capsys: pytest.CaptureFixture[str], is_elsewhere: bool
) -> None:
    left = [] if is_elsewhere else [WorkerState(1, exit_code=0)]
    hosts = [Host(worker(0, TORCH_GROUP, True), *left), *([Host(finished=(1,))] if is_elsewhere else [])]
    hang = outcome(hosts)
    assert hang
    assert hang.rank == 1
    assert "rank 1 has exited with code 0: it finished before the other ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "ends"),
    [
        ({"phase": "running"}, False),  # waits for a tracker
        ({"phase": "checkpoint"}, False),  # or for a disk
        ({"phase": "checkpoint"}, True),  # a training without peers ends only by itself
        ({"is_debugged": True}, False),
    ],
)
def test_training_that_may_wait_is_not_ended(
    facts: dict[str, Any], ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome([Host(worker(0, TRAINER, True), worker(1, TRAINER, False, **facts))], ends=ends) is None
    assert "is_debugged" not in facts or not capsys.readouterr().err


def test_a_training_with_a_stopped_worker_is_ended_in_any_phase() -> None:
    stopped = replace(worker(1, TRAINER, False), state="T")
    assert outcome([Host(worker(0, TRAINER, True), stopped)]) is not None


def test_a_job_without_a_process_group_is_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    host = Host(worker(0, 0, False), worker(1, TRAINER | FINISHED, False))
    assert outcome([host], ends=True) is None
    assert host.asked == 0
    assert not capsys.readouterr().err


def test_worker_that_does_not_create_the_awaited_group_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    hang = outcome([Host(worker(0, JOINING, False)), Host(worker(1, 0, False))], ends=True)
    assert hang
    assert hang.rank == 1
    printed = capsys.readouterr().err
    assert "rank 1 (host host1) has not entered the creation of a process group; rank 0 has waited for it" in printed


def test_a_job_with_a_host_that_moves_is_not_asked() -> None:
    hosts = [Host(worker(0, TRAINER, True)), Host(worker(1, TRAINER, True))]
    hosts[1].no_progress.clear()
    assert outcome(hosts) is None
    assert hosts[0].asked == 0


def test_a_host_that_moves_during_the_inspection_ends_nothing() -> None:
    class Moving(Host):
        async def inspect(self) -> Inspected:
            self.no_progress.clear()
            self.progressing.set()
            return await super().inspect()

    assert outcome([Moving(worker(0, TRAINER, True), worker(1, TRAINER, False, phase="forward"))]) is None


def test_one_inspection_that_fails_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    host = Silent(worker(0, TRAINER, True), worker(1, TRAINER, False, phase="forward"), failures=1)
    hang = outcome([host])
    assert hang
    assert hang.rank == 1
    assert host.asked == 2
    assert "failed" not in capsys.readouterr().err


def test_hang_that_cannot_be_inspected_ends_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    boards = (
        WorkerState(0, 100, state="S", flags=TRAINER, phase="backward", pending=1),
        worker(1, TRAINER, False, phase="forward", step=7),
    )
    hang = outcome([Silent(*boards)])
    assert hang
    assert (hang.rank, hang.code) == (1, HangError.exit_code)
    assert capsys.readouterr().err.splitlines() == [
        "lockstep: rank 1 (host host1) has not entered a collective; rank 0 has waited for it for 300 s",
        "lockstep: rank 1 is in forward",
        "lockstep: node: 2 inspections failed (no answer within 10 s): the stacks of its workers are unknown",
    ]


def test_responsive_hosts_are_explained_beside_a_silent_one(capsys: pytest.CaptureFixture[str]) -> None:
    hosts = [Host(worker(0, HVD, True)), Silent(worker(1, HVD, False))]
    hang = outcome(hosts, ends=True)
    assert hang
    assert hang.rank == 1
    assert "rank 1 (host host1) has not entered all_reduce #9 of float[3]" in capsys.readouterr().err
