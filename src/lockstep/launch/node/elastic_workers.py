"""An elastic job's workers on one host: each is started on the launcher's request and exits independently."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lockstep.launch.node.host_workers import STREAMS, carry
from lockstep.launch.node.processes import kill_descendants, kill_orphans
from lockstep.launch.node.worker_starter import Child, WorkerStarter, signal_group, start
from lockstep.launch.plan.job_plan import handed_on
from lockstep.launch.protocol.messages import (
    Ended,
    Message,
    NodeJob,
    NodesConnected,
    SignalSlotWorker,
    SlotWorkerEnded,
    Start,
    Started,
    StartSlotWorker,
)
from lockstep.launch.protocol.reachability import Listeners
from lockstep.world.elastic_rendezvous import LIFE, SLOT


@dataclass(frozen=True)
class ElasticWorker:
    """A worker's process, the variables that only it and its descendants have, and the tasks that read its output."""

    child: Child
    identity: Mapping[str, str]
    carriers: set[asyncio.Task[None]]


class ElasticWorkers:
    """The workers, from the job's start to its end.

    Args:
        child_ended: Set whenever a child of this process has exited.
        send: Send a message to the launcher.
    """

    def __init__(
        self,
        job: NodeJob,
        starter: WorkerStarter,
        child_ended: asyncio.Event,
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.job = job
        self.work: asyncio.Task[None] | None = None
        self._starter = starter
        self._child_ended = child_ended
        self._send = send
        self._environment = {**handed_on(os.environ), **job.environment}
        self._workers: dict[int, ElasticWorker] = {}
        self._carriers: set[asyncio.Task[None]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._has_ended = False

    def prepare(self) -> None:
        """Start to import what the workers need."""
        self._starter.prepare(self.job.command, self._environment)

    def start(self, start: Start, listeners: Listeners | None) -> None:
        """In a task, send `Started` when workers can be started, then report each worker that exits."""
        self.work = asyncio.create_task(self._watch())

    async def obey(self, message: StartSlotWorker | SignalSlotWorker) -> None:
        """Start a worker, or send a signal to one unless it has exited."""
        match message:
            case StartSlotWorker(number, variables):
                await self._start_worker(number, variables)
            case SignalSlotWorker(worker, number) if worker in self._workers:
                signal_group(self._workers[worker].child, signal.Signals(number))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all workers, but not to their descendants."""
        for worker in self._workers.values():
            with suppress(OSError):
                os.kill(worker.child.pid, number)

    async def end(self, seconds: float) -> None:
        """End the workers and their descendants; kill them after `seconds`."""
        if self._has_ended:
            return
        self._has_ended = True
        for number in (signal.SIGTERM, signal.SIGKILL) if seconds else (signal.SIGKILL,):
            for worker in self._workers.values():
                signal_group(worker.child, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), seconds or self.job.timings.worker_end)
        if self.work:
            self.work.cancel()
        self._starter.close()
        left = await asyncio.to_thread(kill_descendants)
        if self._carriers:
            await asyncio.wait(self._carriers, timeout=self.job.timings.output if left else None)
        await self._send(Ended(left=tuple(left)))

    async def _start_worker(self, number: int, variables: Mapping[str, str]) -> None:
        environment = {**self._environment, **variables}
        readers, writers = zip(os.pipe(), os.pipe(), strict=True)
        forked = await asyncio.to_thread(
            self._starter.fork, [environment], self.job.folder, self.job.bind, [(writers[0], writers[1])]
        )
        child = forked[0] if forked else start(self.job.command, environment, self.job.bind, (writers[0], writers[1]))
        for writer in writers:
            os.close(writer)
        carriers = {
            asyncio.create_task(carry(number, name, reader, self._send))
            for name, reader in zip(STREAMS, readers, strict=True)
        }
        for carrier in carriers:
            self._carriers.add(carrier)
            carrier.add_done_callback(self._carriers.discard)
        identity = {name: variables[name] for name in (*SLOT, LIFE)}
        self._workers[number] = ElasticWorker(child, identity, carriers)
        self._none_left.clear()
        self._child_ended.set()  # it may have exited before it was registered

    async def _watch(self) -> None:
        await self._send(NodesConnected())
        await asyncio.to_thread(self._starter.wait)
        await self._send(Started(0, 0, self._starter.obstacle))
        while True:
            await self._child_ended.wait()
            self._child_ended.clear()
            for number, worker in list(self._workers.items()):
                if (code := worker.child.poll()) is not None:
                    await self._clean_up(worker)
                    del self._workers[number]
                    await self._send(SlotWorkerEnded(number, code))
            if not self._workers:
                self._none_left.set()

    async def _clean_up(self, worker: ElasticWorker) -> None:
        """Kill a worker's orphaned descendants, if they can be distinguished from those of other workers."""
        signal_group(worker.child, signal.SIGKILL)
        known = [*self._starter.pids, *(each.child.pid for each in self._workers.values())]
        await asyncio.to_thread(kill_orphans, worker.identity, but=known)
        await asyncio.wait(worker.carriers, timeout=self.job.timings.settle)
