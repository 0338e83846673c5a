"""One generation of a job's workers on one host: their variables, their output, and the report of their outcome."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lockstep.diagnosis import FOLDER, NODE, OBSERVE, flight_recorder
from lockstep.errors import LockstepError
from lockstep.launch.node.processes import kill_descendants, kill_orphans
from lockstep.launch.node.progress_watch import ProgressWatch
from lockstep.launch.node.worker_starter import HostStore, WorkerStarter, open_streams, signal_group, start
from lockstep.launch.node.worker_watch import StayingWorkers, Worker, WorkerWatch, carry
from lockstep.launch.plan.worker_variables import (
    handed_on,
    horovod_variables,
    of_horovodrun,
    threads,
    torchrun_variables,
)
from lockstep.launch.protocol.messages import Ended, Failing, Message, NodeJob, Output, Start, Started
from lockstep.launch.protocol.reachability import Listeners, listen, proof
from lockstep.world import COMMIT, LOSS, NODE_PROCESS, RESTART_COUNT, SNAPSHOTS, MemberState
from lockstep.world.devices import usable_cores
from lockstep.world.interfaces import LOOPBACK_INTERFACE, addresses, interface_of, only_interface


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
            workers = self._seats.arrange(kept, common, start.address, port, errors)
            for worker in kept:
                if worker not in workers:
                    self._staying.answer(worker.number, {})
                    self._dismissed.add(asyncio.create_task(self._see_off(worker)))
            await self._run(workers, kept, progress)
        finally:
            if self._store:
                self._store.close()

    async def _run(self, workers: Sequence[Worker], kept: Sequence[Worker], progress: ProgressWatch) -> None:
        """Start the workers, except those that are kept, and wait for their exits and the end of their output."""
        printed = self._starter.printed()
        self._is_starting = True
        await self._start_workers([worker for worker in workers if worker not in kept])
        for worker in workers:
            if worker in kept and self._waits(worker):  # otherwise it has just exited, which the watch notices
                self._staying.answer(worker.number, worker.variables)
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

    async def _start_workers(self, workers: Sequence[Worker]) -> None:
        job, store = self.job, self._store
        streams, readers = open_streams(len(workers), job.stdout, job.terminal)
        variables = [{**self._seats.environment, **worker.variables} for worker in workers]
        children = await asyncio.to_thread(self._starter.fork, variables, job.folder, job.bind, streams, store)
        if store:
            store.adopt(children.pop() if len(children) > len(workers) else None)
        for index in range(len(children), len(workers)):
            children.append(start(job.command, variables[index], job.bind, streams[index]))
        for writer in (each for pair in streams for each in pair):
            os.close(writer)
        for worker, child, own in zip(workers, children, readers, strict=True):
            worker.child = child
            worker.carriers = tuple(asyncio.create_task(carry(worker, *each, self._send)) for each in own)

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


class Seats:
    """The places of one generation's workers on this host, and the variables of each.

    Attributes:
        environment: The variables that are the same in each generation.
    """

    def __init__(self, job: NodeJob, staying: StayingWorkers, own: Callable[[], list[tuple[str, str]]] = addresses):
        self._job, self._staying, self._addresses = job, staying, own
        self.environment = {**handed_on(os.environ), **job.environment}
        self.environment.setdefault("OMP_NUM_THREADS", str(threads(usable_cores(), job.workers)))

    def common(self, address: str, own: str) -> dict[str, str]:
        """Return the variables of all workers of this generation, for a store at an address.

        Args:
            own: This host's address on the route there.
        """
        job = self._job
        interface = LOOPBACK_INTERFACE if address.startswith("127.") else interface_of(own)
        run_id = proof(job.secret, "run").hex()[:16]  # the workers see this, so it is not the secret
        found = {**self.variables(interface), "TORCHELASTIC_RUN_ID": run_id, SNAPSHOTS: job.snapshots, LOSS: job.loss}
        self.environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun has it
        self.environment.setdefault(*flight_recorder.VARIABLE)
        return {name: value for name, value in found.items() if value}

    def variables(self, interface: str) -> dict[str, str]:
        """Return the workers' variables that depend on the route to the first host."""
        variables = {"HOROVOD_HOSTNAME": self._job.host}
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
            found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": self._for_nccl(interface)}
            chosen = () if self._job.loopback else self.environment  # by the user
            variables |= {name: value for name, value in found.items() if value and name not in chosen}
        return variables

    def _for_nccl(self, interface: str) -> str:
        """Return NCCL's interfaces, or "" to let it choose: it combines the bandwidth of several interfaces."""
        if interface == LOOPBACK_INTERFACE:
            # NCCL chooses once in a process, which may stay when another host is added.
            return "" if self._job.is_elastic else f"={interface}"  # without "=", eth1 would also match eth10
        if self._job.interfaces:
            return f"={','.join(self._job.interfaces)}"
        return f"={interface}" if only_interface(self._addresses()) == interface else ""

    def arrange(
        self, kept: Sequence[Worker], common: Mapping[str, str], address: str, port: int, errors: Path
    ) -> list[Worker]:
        """Return the workers by rank: those that stay, with their local ranks, and new ones.

        Args:
            kept: The workers that wait; some may have no place.
            common: The variables of all workers of this generation.
            errors: The folder for their error files.
        """
        kept = sorted(kept, key=lambda worker: worker.rank)
        must_lead = any(self._staying.must_lead(worker.number) for worker in kept)
        # Training lets the worker with local rank 0 act for its host.
        staying = [each for each in kept if must_lead or each.local_rank < self._job.workers][: self._job.workers]
        taken = {worker.local_rank for worker in staying}
        free = [local_rank for local_rank in range(self._job.workers + len(taken)) if local_rank not in taken]
        new = [Worker(next(self._staying.numbers), each) for each in free[: self._job.workers - len(staying)]]
        workers = [*staying, *new]  # those that stay come first, or keep their ranks
        if not must_lead:
            workers.sort(key=lambda worker: worker.local_rank)
        for place, worker in enumerate(workers):
            own = self._of_worker(place, worker.local_rank, address, port)
            own["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{place}.json")
            if self._job.is_elastic:
                own[NODE_PROCESS] = self._staying.address_for(worker.number)
            own = {**common, **own}
            worker.variables = of_horovodrun(own, self._job.node) if NODE in self.environment else own
        return workers

    def _of_worker(self, place: int, local_rank: int, address: str, port: int) -> dict[str, str]:
        """Return the variables with a worker's rank info."""
        job = self._job
        variables = {
            **torchrun_variables(job.node, place, job.slots, address, port),
            RESTART_COUNT: str(job.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        }
        variables |= horovod_variables(variables, job.slots)
        return variables | {"LOCAL_RANK": str(local_rank), "HOROVOD_LOCAL_RANK": str(local_rank)}
