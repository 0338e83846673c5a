"""One generation of a job's workers on one host: their variables, their output, and the report of their outcome."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lockstep.diagnosis import FOLDER, OBSERVE
from lockstep.errors import LockstepError
from lockstep.launch.node.host_store import HostStore
from lockstep.launch.node.processes import kill_descendants, kill_orphans
from lockstep.launch.node.progress_watch import ProgressWatch
from lockstep.launch.node.seats import Seats
from lockstep.launch.node.staying_workers import StayingWorkers
from lockstep.launch.node.worker_starter import WorkerStarter, open_streams, signal_group, start
from lockstep.launch.node.worker_watch import Seat, Worker, WorkerWatch, carry
from lockstep.launch.protocol.messages import Ended, Failing, Message, NodeJob, Output, Start, Started
from lockstep.launch.protocol.reachability import Listeners, listen
from lockstep.world import COMMIT, NODE_PROCESS, MemberState


class NodeError(LockstepError):
    """This host cannot run its part of the job."""


class HostWorkers:
    """This host's workers in one generation of the job, until all have exited or wait for the next one.

    Args:
        scratch: A folder for files that are needed until the end.
        staying: What the workers that stay have said.
        kept: The workers that wait for this generation.
        changed: Set whenever a child of this process has exited, or a worker that stays has said something.
        send: Send a message to the launcher.
    """

    def __init__(
        self,
        job: NodeJob,
        scratch: Path,
        starter: WorkerStarter,
        staying: StayingWorkers,
        kept: Sequence[Worker],
        changed: asyncio.Event,
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.job = job
        self.work: asyncio.Task[None] | None = None
        self._scratch = scratch
        self._starter = starter
        self._staying = staying
        self._kept = kept
        self._changed = changed
        self._send = send
        self._watch: WorkerWatch | None = None
        self._progress: ProgressWatch | None = None
        self._has_reported = False
        self._store: HostStore | None = None
        self._dismissed = set[asyncio.Task[None]]()
        self._is_starting = self._must_leave = False
        self._seats = Seats(job, staying)
        starter.prepare(job.command, self._seats.environment)

    def start(self, start: Start, listeners: Listeners | None) -> None:
        """Start the work, which ends with the workers.

        Args:
            listeners: The first host's listeners, one of which serves the store.
        """
        self.work = asyncio.create_task(self._carry_out(start, listeners))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers."""
        if self._watch:
            self._watch.signal(number)

    @property
    def waiting(self) -> Sequence[Worker]:
        """The workers that wait for the next generation."""
        if self._watch:
            return self._watch.waiting()
        return [each for each in self._kept if each.poll() is None and self._waits(each)]

    def _waits(self, worker: Worker) -> bool:
        return self._staying.state(worker.number) == MemberState.WAITS

    async def leave(self) -> None:
        """End this generation: the workers that stay leave it, and the others are ended."""
        self._must_leave = True
        if self._watch:
            self._watch.leave()
        if self._watch and self._store:
            self._store.end()  # also if no worker is left on this host, and nothing else would end it
        if self._is_starting:
            return
        await self._cancel()
        await self._report_ended(self._with_waiting(Ended()))

    async def inspect(self) -> None:
        """Send the state of all workers to the launcher."""
        if self._watch and self._progress:
            await self._send(await self._progress.inspect(self._watch.processes))

    async def end(self, seconds: float) -> None:
        """End the workers and their descendants; kill them after `seconds`."""
        for worker in self.waiting:
            self._staying.answer(worker.number, {})
        if self._watch:
            await self._watch.end(seconds)
            if self.work:
                with suppress(TimeoutError, LockstepError, OSError):
                    await asyncio.wait_for(asyncio.shield(self.work), self.job.timings.output)
        else:
            await self._cancel()
            self._starter.close()
        left = await asyncio.to_thread(kill_descendants, but=self._starter.pids)
        await self._report_ended(Ended(left=tuple(left)))

    async def _cancel(self) -> None:
        """Cancel the work, which still waits for imports or for other nodes."""
        if self.work:
            self.work.cancel()
            with suppress(asyncio.CancelledError, LockstepError, OSError):
                await self.work

    async def _carry_out(self, start: Start, listeners: Listeners | None) -> None:
        job, port = self.job, start.port
        if job.node == 0:
            listener = listeners.take(start.address) if listeners else listen(start.address)
            self._store = HostStore(listener, start.address, job.timings.store_look)
            port = self._store.port
        try:
            common = self._seats.common(start.address, start.own)
            await asyncio.to_thread(self._starter.wait)
            boards, errors = (Path(mkdtemp(dir=self._scratch)) for _ in range(2))
            common[FOLDER] = str(boards)
            self._progress = progress = ProgressWatch(boards, job.hang_timeout or math.inf, self._send)
            kept = self.waiting
            seats = self._seats.arrange(kept, common, start.address, port, errors)
            for worker in kept:
                if all(seat.kept is not worker for seat in seats):
                    self._staying.answer(worker.number, {})
                    self._dismissed.add(asyncio.create_task(self._see_off(worker)))
            await self._run(seats, progress)
        finally:
            if self._store:
                self._store.close()

    async def _run(self, seats: Sequence[Seat], progress: ProgressWatch) -> None:
        """Start the workers, and wait for their exits and the end of their output."""
        printed = self._starter.printed()
        self._is_starting = True
        workers = await self._start_workers(seats)
        self._watch = WorkerWatch(workers, self._staying, self._changed, self.job.timings)
        if self._must_leave:  # since they were being started
            self._watch.leave()
        await self._send(Started(self._starter.obstacle))
        if printed:
            await self._send(Output(workers[0].rank, "stderr", f"{printed}\n"))
        ranks = {worker.rank for worker in workers}
        watching = [asyncio.create_task(progress.follow_exits(self._watch, self._staying))]
        if self.job.hang_timeout:
            watching.append(asyncio.create_task(progress.run(self._watch)))
        if self.job.environment.get(OBSERVE):
            watching.append(asyncio.create_task(progress.follow_steps(ranks)))
        try:
            outcome = await self._outcome(self._watch, progress)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        ended = [worker for worker in workers if worker.code is not None]
        timings, limit = self.job.timings, None
        if self.waiting:  # a daemon that cannot be recognized may keep the streams open
            left, limit = await asyncio.to_thread(self._kill_orphans_of, ended), timings.settle
        elif left := await asyncio.to_thread(kill_descendants, but=self._spared):
            limit = timings.output
        if carriers := [carrier for worker in ended for carrier in worker.carriers]:
            await asyncio.wait(carriers, timeout=limit)
        apart = progress.have_not_met(ranks)
        await self._report_ended(self._with_waiting(replace(outcome, left=tuple(left), apart=apart)))

    def _with_waiting(self, ended: Ended) -> Ended:
        has_commit = bool(self.job.snapshots) and Path(self.job.snapshots, COMMIT).exists()
        return replace(
            ended,
            staying=len(self.waiting),
            must_lead=self._staying.have_state or has_commit,
            has_commit=has_commit,
        )

    def _kill_orphans_of(self, ended: Sequence[Worker]) -> list[int]:
        """Kill the descendants of workers that have exited, if they can be distinguished from those of others."""
        known, left = [*self._spared, *(worker.child.pid for worker in self.waiting)], list[int]()
        for worker in ended:
            left += kill_orphans({NODE_PROCESS: self._staying.address_for(worker.number)}, but=known)
        return left

    async def _report_ended(self, ended: Ended) -> None:
        """Report the end of this host's part to the launcher, once."""
        if not self._has_reported:
            self._has_reported = True
            await self._send(ended)

    async def _outcome(self, watch: WorkerWatch, progress: ProgressWatch) -> Ended:
        """Wait until this host's workers exit; return the outcome."""
        ending = asyncio.create_task(watch.wait(self._report_failing, progress.report_late))
        store_lost = asyncio.ensure_future(self._store.failure() if self._store else asyncio.Future[str]())
        tasks: list[asyncio.Future[Any]] = [ending, store_lost]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done() and self.job.is_elastic:
                watch.leave()
            elif not ending.done():
                await watch.end(self.job.timings.worker_end)
            failures = tuple(await ending)
            if store_lost.done() and not failures:
                return Ended(error=store_lost.result())
            return Ended(failures)
        finally:
            for task in tasks:
                task.cancel()

    async def _report_failing(self) -> None:
        await self._send(Failing())
        if self.job.is_elastic:
            self._staying.tell({"over": True})
            if self._store:
                self._store.end()

    async def _start_workers(self, seats: Sequence[Seat]) -> list[Worker]:
        """Start the workers for the free seats, give the others their new variables, and return all by rank."""
        job, store = self.job, self._store
        free = [seat for seat in seats if not seat.kept]
        streams, readers = open_streams(len(free), job.stdout, job.terminal)
        variables = [{**self._seats.environment, **seat.variables} for seat in free]
        description = store.description if store else None
        children = await asyncio.to_thread(self._starter.fork, variables, job.folder, job.bind, streams, description)
        if store:
            store.adopt(children.pop() if len(children) > len(free) else None)
        for index in range(len(children), len(free)):
            children.append(start(job.command, variables[index], job.bind, streams[index]))
        for writer in (each for pair in streams for each in pair):
            os.close(writer)
        started = [
            Worker(seat.number, seat.rank, seat.local_rank, child, seat.error_file)
            for seat, child in zip(free, children, strict=True)
        ]
        for worker, own in zip(started, readers, strict=True):
            worker.carriers = tuple(asyncio.create_task(carry(worker, *each, self._send)) for each in own)
        for seat in seats:
            if seat.kept:
                seat.kept.rank, seat.kept.error_file = seat.rank, seat.error_file
                if self._waits(seat.kept):  # otherwise it has just exited, which the watch notices
                    self._staying.answer(seat.number, seat.variables)
                started.append(seat.kept)
        return sorted(started, key=lambda worker: worker.rank)

    async def _see_off(self, worker: Worker) -> None:
        """Kill a worker that is not needed any more, unless it exits in time."""
        deadline = time.monotonic() + self.job.timings.host_end
        while worker.poll() is None:
            if time.monotonic() > deadline:
                signal_group(worker.child, signal.SIGKILL)
            await asyncio.sleep(self.job.timings.settle)

    @property
    def _spared(self) -> list[int]:
        """The processes that outlive this host's workers: other hosts' workers need the store."""
        return [*self._starter.pids, *(self._store.pids if self._store else [])]
