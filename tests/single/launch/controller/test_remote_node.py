"""What the launcher does about a node process that does not end when it is asked to."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from node_jobs import JOB

from lockstep.launch.controller.host_process import Subprocess, start_process
from lockstep.launch.controller.remote_node import NodePool, Remote
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.job_plan import NodePlan
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import Ended, Message, NodeReady, Started


async def _show(rank: int, name: str, text: bytes) -> None:
    raise AssertionError("nothing was printed")


def test_node_whose_child_holds_its_streams_is_left_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    node = NodePlan("here", 1, ("sh", "-c", f"sleep 1000 & echo $! >{pid}.part; mv {pid}.part {pid}; wait"))

    async def start_and_close() -> None:
        process, open_before = Remote(), psutil.Process().num_fds()
        process.take(0, node, _show)
        await process.start(JOB)
        while not pid.exists():
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await process.close()
            while psutil.Process().num_fds() > open_before:  # else asyncio closes them when its loop is gone
                await asyncio.sleep(0.01)

    try:
        asyncio.run(start_and_close())
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def _trouble(script: str, kind: type[Message]) -> str:
    """Why a node process that is a shell script does not give an answer."""

    async def start_and_wait() -> str:
        process = Remote()
        process.take(0, NodePlan("here", 1, ("sh", "-c", script)), _show)
        await process.start(JOB)
        try:
            with pytest.raises(StartError) as error:
                await process.answer(kind)
            return str(error.value)
        finally:
            await process.close()

    return asyncio.run(start_and_wait())


def test_one_that_is_killed_during_the_start_is_named_as_such() -> None:
    killed = "the node process on here was killed by SIGKILL (possibly out of memory)"
    assert _trouble("kill -KILL $$", NodeReady) == f"{killed} during the start"
    answers = """echo '{"is": "nodeready", "versions": {}, "listeners": {}}';"""
    assert _trouble(f"{answers} kill -KILL $$", Started) == f"{killed} while its workers were starting"
    assert _trouble(f"{answers} echo why >&2; exit 7", Started).endswith("exited: why while its workers were starting")


def test_guard_of_a_lost_node_process_may_complete_its_work(tmp_path: Path) -> None:
    """The loss is noticed before."""
    ready = """{"is": "nodeready", "versions": {}, "listeners": {}}"""
    started = """{"is": "started", "note": ""}"""
    wait = f"until [ -e {tmp_path}/may-end ]; do sleep 0.05; done; touch {tmp_path}/cleaned"
    guard = f"echo '{ready}'; echo '{started}'; exec >&- 2>&-; {wait}"
    job = replace(JOB, timings=Timings(close=0.1, job_end=100.0, caller_end=200.0))

    async def start_and_close() -> None:
        remote = Remote()
        remote.take(0, NodePlan("here", 1, ("sh", "-c", guard)), _show)
        await remote.start(job)
        async with asyncio.timeout(90):
            await remote.end
            closing = asyncio.create_task(remote.close())
            await asyncio.wait([closing], timeout=0.5)  # longer than `close`
            (tmp_path / "may-end").touch()
            await closing
        assert (tmp_path / "cleaned").exists()

    asyncio.run(start_and_close())


class _LeftAlone(Remote):
    """A node process that is free, and then lost; its closing waits for the barrier."""

    is_lost, is_free = False, True
    barrier: asyncio.Barrier

    async def close(self) -> None:
        await self.barrier.wait()


async def _pool_of_lost(nodes: list[NodePlan], barrier: asyncio.Barrier) -> NodePool:
    pool, remotes = NodePool(), [_LeftAlone() for _ in nodes]
    for index, (remote, node) in enumerate(zip(remotes, nodes, strict=True)):
        remote.take(index, node, _show)
        remote.barrier = barrier
    await pool.give_back([*remotes], keep=True)
    for remote in remotes:
        remote.is_lost = True
    return pool


def test_lost_node_processes_are_closed_together() -> None:
    nodes = [NodePlan(host, 1, ("ssh", host)) for host in ("a", "b")]

    async def take() -> list[Remote]:
        async with asyncio.timeout(60):
            return await (await _pool_of_lost(nodes, asyncio.Barrier(2))).take(nodes, _show)

    assert [type(remote) for remote in asyncio.run(take())] == [Remote, Remote]


def test_pool_keeps_those_that_it_could_not_close_yet() -> None:
    nodes = [NodePlan(host, 1, ("ssh", host)) for host in ("a", "b")]

    async def stop_while_taking() -> None:
        barrier = asyncio.Barrier(3)
        pool = await _pool_of_lost(nodes, barrier)
        async with asyncio.timeout(60):
            taking = asyncio.create_task(pool.take(nodes, _show))
            while barrier.n_waiting < 2:
                await asyncio.sleep(0)
            taking.cancel()
            await asyncio.wait([taking])
            await asyncio.gather(pool.close(), barrier.wait())

    asyncio.run(stop_while_taking())


def test_a_job_goes_on_while_a_lost_node_process_ends() -> None:
    """Unless its host is to be used again."""
    nodes = [NodePlan(host, 1, ("ssh", host)) for host in ("a", "b")]

    async def lose_b() -> None:
        pool, remotes, barrier = NodePool(), [_LeftAlone() for _ in nodes], asyncio.Barrier(2)
        for index, (remote, node) in enumerate(zip(remotes, nodes, strict=True)):
            remote.take(index, node, _show)
            remote.barrier = barrier
        remotes[0].end.set_result(Ended())
        remotes[1].is_lost, remotes[1].is_free = True, False
        async with asyncio.timeout(60):
            await pool.give_back([*remotes], keep=True)
            assert await pool.take(nodes[:1], _show) == remotes[:1]
            again = asyncio.create_task(pool.take(nodes[1:], _show))
            for _ in range(100):  # far more turns of the loop than it would need
                await asyncio.sleep(0)
            assert not again.done()
            await barrier.wait()
            assert type((await again)[0]) is Remote
            await pool.close()

    asyncio.run(lose_b())


def test_manually_started_node_starts_its_own_process() -> None:
    class Others:
        async def start(self, host: str) -> Subprocess:
            return await start_process(("sh", "-c", f"echo {host} >&2; exit 5"), True)

        async def is_present(self, host: str, seconds: float) -> bool:
            return True

        def report(self, text: str) -> None:
            pass

    async def start_and_wait() -> None:
        (remote,) = await NodePool().take([NodePlan("far", 1, (), is_here=False)], _show, others=Others())
        await remote.start(JOB)
        with pytest.raises(StartError, match=r"^far failed to start: far$"):
            await remote.answer(NodeReady)
        await remote.close()

    asyncio.run(start_and_wait())
