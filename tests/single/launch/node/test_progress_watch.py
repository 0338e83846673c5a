"""When a host stands still: no progress, and no sign of life of a worker that is not in a collective."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.diagnosis import idle_clock
from lockstep.diagnosis.board import ANSWERS, FINISHED, HVD, JOINING, TORCH, TORCH_GROUP, Board, BoardReader
from lockstep.diagnosis.idle_clock import Activity, IdleClock
from lockstep.diagnosis.inspection import Frame, WorkerState
from lockstep.energy.counters import EnergyCounter
from lockstep.energy.meter import EnergyMeter
from lockstep.launch.node import progress_watch
from lockstep.launch.node.progress_watch import ProgressWatch
from lockstep.launch.protocol.messages import Inspected, Message, NoProgress, PeersLeft, StepsObserved

LIMIT = 0.2
STATE = WorkerState(0, stack=(Frame("x.py", 1, "f"),))


class Host:
    """A host whose one worker is this process, with invented signs of life."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.board = Board(folder, 0)
        self.sent: list[Message] = []
        self.processes: dict[int, tuple[int, int | None]] = {0: (os.getpid(), None)}
        self.finished: tuple[int, ...] = ()
        self.own = self.tree = Activity(0.0, 0)
        self.line, self.collectives = 1, (0, 0)
        self.watch = ProgressWatch(folder, LIMIT, self._send)
        self.inspect: Callable[[BoardReader], WorkerState] = lambda board: STATE
        self.ticks, self.happens, tick = 0, lambda: None, IdleClock.tick

        def counted(*arguments: Any) -> float:
            self.happens()
            self.ticks += 1
            return tick(*arguments)

        invented: list[tuple[Any, str, Any]] = [
            (IdleClock, "tick", counted),
            (idle_clock, "activity", lambda pid, descendants=True: self._activity(descendants)),
            (progress_watch, "inspect_worker", lambda board: self.inspect(board)),
        ]
        for module, name, function in invented:
            monkeypatch.setattr(module, name, function)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _activity(self, descendants: bool) -> Activity:
        return self.tree if descendants else self.own

    def watched(self, happens: Callable[[int], None] = lambda tick: None, ticks: int = 60) -> list[Message]:
        """The messages while this happens at each of so many ticks of the clock, of which 20 make the limit."""
        first = self.ticks
        self.happens = lambda: happens(self.ticks - first)

        async def follow() -> None:
            watching = asyncio.create_task(self.watch.run(self))  # type: ignore[arg-type]
            while self.ticks < first + ticks:
                await asyncio.sleep(LIMIT / 20)
            watching.cancel()

        asyncio.run(follow())
        return self.sent


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_workers_without_a_group_are_left_to_the_launcher(host: Host) -> None:
    host.watched(ticks=100)
    (standstill,) = host.sent
    assert isinstance(standstill, NoProgress)
    assert [state.flags for state in standstill.workers] == [0]


def test_worker_that_publishes_nothing_is_watched_at_first(host: Host) -> None:
    """It may hang before it has imported torch, while the others wait for it to create a process group."""
    host.processes[1] = (1, None)
    host.board.set_flag(JOINING)
    host.watched(ticks=100)
    (standstill,) = host.sent
    assert isinstance(standstill, NoProgress)
    assert [(state.rank, state.pid, state.flags & JOINING) for state in standstill.workers] == [
        (0, os.getpid(), JOINING),
        (1, 1, 0),
    ]
    host.board.set_flag(TORCH_GROUP)
    del host.sent[:]
    host.watched(ticks=100)
    assert [[state.rank for state in message.workers] for message in host.sent] == [[], [0]]  # type: ignore[union-attr]


def test_exits_are_sent_and_that_all_others_join(host: Host) -> None:
    staying = SimpleNamespace(has_lost_peer=False)

    async def follow() -> None:
        async def next_one() -> Message:
            while not host.sent:
                await asyncio.sleep(0)
            return host.sent.pop()

        following = asyncio.create_task(host.watch.follow_exits(host, staying, 0.01))  # type: ignore[arg-type]
        host.processes |= {1: (1, 0), 2: (1, None)}
        host.finished = (1,)
        host.board.set_flag(JOINING)
        assert await next_one() == PeersLeft((1,))
        staying.has_lost_peer = True
        assert await next_one() == PeersLeft((1,), lost_peer=True)
        host.processes[2] = (1, 0)  # it was running, and not joining
        assert await next_one() == PeersLeft((1,), lost_peer=True, joining=True)
        host.board.set_flag(JOINING, False)
        assert await next_one() == PeersLeft((1,), lost_peer=True)
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), 60))


def test_workers_without_torch_are_not_expected_to_meet(host: Host) -> None:
    assert not host.watch.have_not_met({0})
    host.board.set_flag(TORCH)
    assert host.watch.have_not_met({0})
    host.board.set_flag(JOINING)
    assert not host.watch.have_not_met({0})


def test_a_worker_that_has_finished_is_not_judged(host: Host) -> None:
    host.board.set_flag(TORCH_GROUP | FINISHED)
    assert host.watched(ticks=100) == []


def test_work_is_a_sign_of_life_before_stacks_are_published(host: Host) -> None:
    assert host.watched(lambda tick: _advance(host, own=0.1)) == []
    host.board.set_flag(TORCH_GROUP | ANSWERS)
    host.watched(lambda tick: _advance(host, own=0.1), ticks=150)
    assert isinstance(host.sent[0], NoProgress)


def test_no_progress_is_reported_once_and_progress_after_it(host: Host) -> None:
    host.board.set_flag(TORCH_GROUP)
    host.watched(lambda tick: host.board.touch() if tick < 10 else None, ticks=100)
    (standstill,) = host.sent
    assert isinstance(standstill, NoProgress)
    assert standstill.seconds >= LIMIT
    host.watched(lambda tick: host.board.touch(), ticks=10)
    assert host.sent[1:] == [NoProgress(0.0)]


def test_workers_of_a_launcher_within_a_worker_are_not_judged(host: Host, tmp_path: Path) -> None:
    host.board.set_flag(TORCH_GROUP)
    Board(tmp_path, 1).set_flag(TORCH_GROUP)
    assert host.watched() == []


def test_a_collective_that_ends_is_progress(host: Host) -> None:
    host.board.set_flag(TORCH_GROUP)
    assert host.watched(lambda tick: host.board.set_sample(tick + 1, tick)) == []


def _advance(host: Host, own: float = 0.0, children: float = 0.0, size_bytes: int = 0, line: int = 0) -> None:
    host.own = Activity(host.own.cpu_s + own, 0)
    host.tree = Activity(host.tree.cpu_s + own + children, host.tree.bytes + size_bytes)
    host.line += line
    host.board.set_sample(*host.collectives, host.line)


ALIVE = {
    "busy children": {"children": 0.1},
    "storage": {"size_bytes": 1_000_000},
    "busy, with a changing stack": {"own": 0.1, "line": 1},
}
STUCK = {
    "busy in one line": {"own": 0.1},
    "polling": {"own": 1e-6, "size_bytes": 10, "line": 1},
    "CPU time below the resolution": {"children": 0.001},
}


@pytest.mark.parametrize("signs", ALIVE.values(), ids=ALIVE)
def test_a_sign_of_life_counts_as_progress(host: Host, signs: dict[str, float]) -> None:
    host.board.set_flag(HVD)
    assert host.watched(lambda tick: _advance(host, **signs)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("signs", STUCK.values(), ids=STUCK)
def test_what_does_not_count_as_a_sign_of_life(host: Host, signs: dict[str, float]) -> None:
    host.board.set_flag(HVD | ANSWERS)
    host.watched(lambda tick: _advance(host, **signs), ticks=150)  # type: ignore[arg-type]
    assert isinstance(host.sent[0], NoProgress)


def test_a_worker_in_a_collective_may_spin(host: Host) -> None:
    host.board.set_flag(TORCH_GROUP)
    host.collectives = 9, 8
    host.watched(lambda tick: _advance(host, own=0.1, line=1), ticks=150)
    assert isinstance(host.sent[0], NoProgress)


def test_what_an_inspection_causes_is_not_progress(host: Host) -> None:
    """The worker's thread publishes an old sample, and the dump of its stack is written, because of the signal."""

    def disturb(board: BoardReader) -> WorkerState:
        _advance(host, own=0.1, size_bytes=1_000_000, line=1)
        host.board.set_sample(9, 9, host.line)
        return replace(STATE, pid=os.getpid(), has_answered=False)

    host.inspect = disturb
    host.board.set_flag(HVD | ANSWERS)

    async def inspect_and_wait() -> None:
        watching = asyncio.create_task(host.watch.run(host))  # type: ignore[arg-type]
        while not host.sent:
            await asyncio.sleep(LIMIT / 20)
        for _ in range(3):
            assert (await host.watch.inspect({0: (os.getpid(), None)})).workers[0].stack
            await asyncio.sleep(LIMIT / 2)
        assert len(host.sent) == 1
        host.board.touch()
        while len(host.sent) < 2:
            await asyncio.sleep(LIMIT / 20)
        watching.cancel()

    asyncio.run(asyncio.wait_for(inspect_and_wait(), 60))
    assert isinstance(host.sent[0], NoProgress)
    assert [state.rank for state in host.sent[0].workers] == [0]
    assert host.sent[1] == NoProgress(0.0)


def test_an_inspection_that_fails_says_why(host: Host) -> None:
    def fail(board: BoardReader) -> WorkerState:
        raise MemoryError("no memory")

    host.inspect = fail
    host.board.set_flag(HVD)
    assert asyncio.run(host.watch.inspect({0: (os.getpid(), None)})) == Inspected((), "MemoryError: no memory")


def test_ranks_are_inspected_whatever_their_state(host: Host) -> None:
    host.board.set_flag(TORCH_GROUP)
    with subprocess.Popen(["sleep", "100"]) as shell:
        found = asyncio.run(host.watch.inspect({0: (os.getpid(), None), 1: (shell.pid, None), 2: (99, 3)}))
        shell.kill()
    first, second, third = found.workers
    assert first.stack
    assert (second.rank, second.pid) == (1, shell.pid)
    assert second.state in "RSD"
    assert (third.rank, third.pid, third.exit_code) == (2, 0, 3)


def test_the_energy_of_the_host_and_of_its_workers_gpus_is_sent(host: Host) -> None:
    """Also without steps. Another job computes on the second GPU, whose worker has another rank."""

    def counter(kind: str, name: str, address: str = "") -> EnergyCounter:
        read, busy = itertools.count(0.0, 10.0).__next__, (lambda: 0.3) if address else None
        return EnergyCounter(kind, name, read, address=address, busy=busy)

    counters = [
        counter("cpu", "package-0"),
        counter("gpu", "GPU 0", "0000:0a:00"),
        counter("gpu", "GPU 1", "0000:1a:00"),
    ]
    host.watch.start_meter = lambda: EnergyMeter((counters, ["DRAM: a reason"]))
    host.board.path.with_name("0-12.gpu").write_text("0000:0a:00")
    host.board.path.with_name("7-12.gpu").write_text("0000:1a:00")

    async def follow() -> None:
        following = asyncio.create_task(host.watch.follow_steps({0}))
        while host.watch._energy is None:
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(follow())
    (message,) = host.sent
    assert isinstance(message, StepsObserved)
    assert (message.joules, message.unread) == ({"cpu": 10.0, "gpu": 10.0}, ("DRAM: a reason",))
    assert message.gpu_use == (0.3,)
