"""One generation of a job's workers on one host: their variables, their output, and the report of their outcome."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from lockstep.diagnosis import FOLDER, OBSERVE
from lockstep.errors import LockstepError
from lockstep.launch.forking.orders import NO_TORCH
from lockstep.launch.node.processes import kill_descendants, kill_orphans
from lockstep.launch.node.progress_watch import ProgressWatch
from lockstep.launch.node.staying_workers import StayingWorkers
from lockstep.launch.node.worker_starter import (
    Child,
    Store,
    WorkerStarter,
    open_streams,
    signal_group,
    start,
    start_store,
)
from lockstep.launch.node.worker_watch import Seat, Worker, WorkerWatch, carry
from lockstep.launch.plan.worker_variables import handed_on, horovod_variables, threads, torchrun_variables
from lockstep.launch.protocol.messages import (
    Ended,
    Failing,
    Message,
    NodeJob,
    Output,
    Start,
    Started,
)
from lockstep.launch.protocol.reachability import Listeners, listen, proof
from lockstep.world import COMMIT, LOSS, NODE_PROCESS, RESTART_COUNT, SNAPSHOTS, MemberState
from lockstep.world.devices import usable_cores
from lockstep.world.interfaces import (
    LOOPBACK_INTERFACE,
    addresses,
    interface_of,
    only_interface,
)

FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "2000")  # so many collectives; newer versions of torch record by default


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
        self._store: Child | None = None
        self._listener: socket.socket | None = None
        self._dismissed = set[asyncio.Task[None]]()
        self._is_over = self._is_starting = self._must_leave = False
        self._environment = {**handed_on(os.environ), **job.environment}
        if "OMP_NUM_THREADS" not in self._environment:
            self._environment["OMP_NUM_THREADS"] = str(threads(usable_cores(), job.workers))

    def prepare(self) -> None:
        """Start to import what the workers need."""
        self._starter.prepare(self.job.command, self._environment)

    def start(self, start: Start, listeners: Listeners | None) -> None:
        """Start the work, which ends with the workers.

        Args:
            listeners: The first host's listeners, one of which serves the store.
        """
        self.work = asyncio.create_task(self._carry_out(start.address, start.port, start.own, listeners))

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
            self._end_store()  # also if no worker is left on this host, and nothing else would end it
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

    async def _carry_out(self, address: str, port: int, own: str, listeners: Listeners | None) -> None:
        job = self.job
        listener: socket.socket | None = None
        if job.node == 0:
            listener = listeners.take(address) if listeners else listen(address)
            port = listener.getsockname()[1]
        interface = LOOPBACK_INTERFACE if address.startswith("127.") else interface_of(own)
        run_id = proof(job.secret, "run").hex()[:16]  # the workers see this, so it is not the secret
        common = {**self._variables(interface), "TORCHELASTIC_RUN_ID": run_id}
        self._environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun has it
        if job.snapshots:
            common[SNAPSHOTS] = job.snapshots
        if job.loss:
            common[LOSS] = job.loss
        await asyncio.to_thread(self._starter.wait)
        boards = Path(mkdtemp(dir=self._scratch))
        common[FOLDER] = str(boards)
        self._environment.setdefault(*FLIGHT_RECORDER)
        self._progress = ProgressWatch(boards, job.hang_timeout or math.inf, self._send)
        seats = self._seats(common, address, port)
        if not listener:
            await self._run(seats, None)
            return
        listener.setblocking(True)
        self._listener = listener
        try:
            await self._run(seats, Store(listener.fileno(), address, port))
        finally:
            asyncio.get_running_loop().remove_reader(listener)
            self._listener = None
            listener.close()

    async def _run(self, seats: Sequence[Seat], store: Store | None) -> None:
        """Start the workers, and wait for their exits and the end of their output."""
        first_rank, size = sum(self.job.slots[: self.job.node]), sum(self.job.slots)
        printed = self._starter.printed()
        self._is_starting = True
        workers = await self._start_workers(seats, store)
        self._watch = WorkerWatch(workers, self._staying, self._changed, self.job.timings)
        if self._must_leave:  # since they were being started
            self._watch.leave()
        await self._send(Started(first_rank, size, self._starter.obstacle))
        if printed:
            await self._send(Output(0, "stderr", f"{printed}\n"))
        ranks, watching = {worker.rank for worker in workers}, []
        if self._progress:
            watching.append(asyncio.create_task(self._progress.follow_exits(self._watch, self._staying)))
        if self._progress and self.job.hang_timeout:
            watching.append(asyncio.create_task(self._progress.run(self._watch)))
        if self._progress and self.job.environment.get(OBSERVE):
            watching.append(asyncio.create_task(self._progress.follow_steps(ranks)))
        try:
            outcome = await self._outcome(self._watch)
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
        if self._is_over and self._store:
            self._store.poll()
        if carriers := [carrier for worker in ended for carrier in worker.carriers]:
            await asyncio.wait(carriers, timeout=limit)
        apart = self._progress is not None and self._progress.have_not_met(ranks)
        await self._report_ended(self._with_waiting(replace(outcome, left=tuple(left), apart=apart)))

    def _with_waiting(self, ended: Ended) -> Ended:
        has_commit = bool(self.job.snapshots) and Path(self.job.snapshots, COMMIT).exists()
        return replace(
            ended,
            staying=len(self.waiting),
            must_lead=self._staying.have_state or has_commit,
            has_commit=has_commit,
            finished=self._watch.finished if self._watch else (),
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

    async def _outcome(self, watch: WorkerWatch) -> Ended:
        """Wait until this host's workers exit; return the outcome."""
        ending = asyncio.create_task(watch.wait(self._report_failing, self._report_late))
        store_lost = asyncio.create_task(self._store_lost())
        tasks: list[asyncio.Task[Any]] = [ending, store_lost]
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

    async def _store_lost(self) -> str:
        """Wait until the store's process exits, which it never should; return the error."""
        while not self._store or self._is_over or (code := self._store.poll()) is None:
            await asyncio.sleep(self.job.timings.store_look)
        if code == NO_TORCH:
            return f"{sys.executable} serves the workers' store, but has no torch: name their Python by --python"
        return f"the process that served the job's store exited with code {code}"

    async def _report_failing(self) -> None:
        await self._send(Failing())
        if self.job.is_elastic:
            self._staying.tell({"over": True})
            self._end_store()

    async def _report_late(self, workers: Sequence[Worker], seconds: float, only_blocked: bool) -> list[Worker]:
        """Print what workers do that should have left this generation, unless none was to stay after it.

        Args:
            only_blocked: Leave out workers that do not hold the GIL.

        Returns:
            The workers that were reported.
        """
        if self._progress is None or self.job.timings.leave <= self.job.timings.worker_end:
            return []
        from lockstep.diagnosis.explanation import describe_worker

        found = await self._progress.inspect({worker.rank: (worker.child.pid, None) for worker in workers})
        states = {state.rank: state for state in found.workers if state.holds_gil or not only_blocked}
        late = [worker for worker in workers if worker.rank in states]
        head = f"lockstep: killed, because it has not left its generation within {seconds:g} s:"
        for worker in late:
            await self._send(Output(worker.place, "stderr", f"{head} {describe_worker(states[worker.rank])}\n"))
        return late

    def _end_store(self) -> None:
        """End the store, so that no worker that stays waits there for one that is lost."""
        self._is_over = True
        if self._listener:
            asyncio.get_running_loop().remove_reader(self._listener)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        if self._store and self._store.poll() is None:
            os.kill(self._store.pid, signal.SIGKILL)

    def _variables(self, interface: str) -> dict[str, str]:
        """Return the workers' variables that depend on the route to the first host."""
        variables = {"HOROVOD_HOSTNAME": self.job.host}
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
            found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": self._for_nccl(interface)}
            variables |= {name: value for name, value in found.items() if value and name not in self._environment}
        return variables

    def _for_nccl(self, interface: str) -> str:
        """Return NCCL's interfaces, or "" to let it choose: it combines the bandwidth of several interfaces."""
        if interface == LOOPBACK_INTERFACE:
            # NCCL chooses once in a process, which may stay when another host is added.
            return "" if self.job.is_elastic else f"={interface}"  # without "=", eth1 would also match eth10
        if self.job.interfaces:
            return f"={','.join(self.job.interfaces)}"
        return f"={interface}" if only_interface(addresses()) == interface else ""

    async def _start_workers(self, seats: Sequence[Seat], store: Store | None) -> list[Worker]:
        """Start the workers for the free seats, give the others their new variables, and return all by rank."""
        job = self.job
        free = [seat for seat in seats if not seat.kept]
        streams, readers = open_streams(len(free), job.stdout, job.terminal)
        variables = [{**self._environment, **seat.variables} for seat in free]
        children = await asyncio.to_thread(self._starter.fork, variables, job.folder, job.bind, streams, store)
        if len(children) > len(free):
            self._store = children.pop()
        elif store:
            asyncio.get_running_loop().add_reader(store.listener, self._serve_store, store)
        for index in range(len(children), len(free)):
            children.append(start(job.command, variables[index], job.bind, streams[index]))
        for writer in (each for pair in streams for each in pair):
            os.close(writer)
        started = [
            Worker(seat.number, seat.rank, seat.place, seat.local_rank, child, seat.error_file)
            for seat, child in zip(free, children, strict=True)
        ]
        for worker, own in zip(started, readers, strict=True):
            worker.carriers = tuple(asyncio.create_task(carry(worker, *each, self._send)) for each in own)
        for seat in seats:
            if seat.kept:
                seat.kept.rank, seat.kept.place, seat.kept.error_file = seat.rank, seat.place, seat.error_file
                if self._waits(seat.kept):  # otherwise it has just exited, which the watch notices
                    self._staying.answer(seat.number, seat.variables)
                started.append(seat.kept)
        return sorted(started, key=lambda worker: worker.rank)

    def _seats(self, common: Mapping[str, str], address: str, port: int) -> list[Seat]:
        """Return this host's places: those of the workers that stay, with their local ranks, and free ones."""
        errors = Path(mkdtemp(dir=self._scratch))
        kept = sorted(self.waiting, key=lambda worker: worker.rank)
        must_lead = any(self._staying.must_lead(worker.number) for worker in kept)
        # Training lets the worker with local rank 0 act for its host.
        staying = [each for each in kept if must_lead or each.local_rank < self.job.workers][: self.job.workers]
        for worker in kept:
            if worker not in staying:
                self._staying.answer(worker.number, {})
                self._dismissed.add(asyncio.create_task(self._see_off(worker)))
        by_local_rank: dict[int, Worker | None] = {worker.local_rank: worker for worker in staying}
        for local_rank in range(self.job.workers + len(by_local_rank)):
            if len(by_local_rank) < self.job.workers:
                by_local_rank.setdefault(local_rank, None)
        seats = []
        order = by_local_rank if must_lead else sorted(by_local_rank)  # those that stay come first, or keep their ranks
        for place, local_rank in enumerate(order):
            stays = by_local_rank[local_rank]
            number = stays.number if stays else next(self._staying.numbers)
            own = self._of_worker(place, local_rank, address, port)
            own["TORCHELASTIC_ERROR_FILE"] = str(errors / f"{place}.json")
            if self.job.is_elastic:
                own[NODE_PROCESS] = self._staying.address_for(number)
            seats.append(Seat(number, place, local_rank, {**common, **own}, stays))
        return seats

    async def _see_off(self, worker: Worker) -> None:
        """Kill a worker that is not needed any more, unless it exits in time."""
        deadline = time.monotonic() + self.job.timings.host_end
        while worker.poll() is None:
            if time.monotonic() > deadline:
                signal_group(worker.child, signal.SIGKILL)
            await asyncio.sleep(self.job.timings.settle)

    def _of_worker(self, place: int, local_rank: int, address: str, port: int) -> dict[str, str]:
        """Return the variables with a worker's rank info."""
        job = self.job
        variables = {
            **torchrun_variables(job.node, place, job.slots, address, port),
            RESTART_COUNT: str(job.generation),
            "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        }
        variables |= horovod_variables(variables, job.slots)
        return variables | {"LOCAL_RANK": str(local_rank), "HOROVOD_LOCAL_RANK": str(local_rank)}

    def _serve_store(self, store: Store) -> None:
        """Start the store's process at the first connection, so that a job without torch does not import it."""
        asyncio.get_running_loop().remove_reader(store.listener)
        self._store = start_store(store)

    @property
    def _spared(self) -> list[int]:
        """The processes that outlive this host's workers: other hosts' workers need the store."""
        return [*self._starter.pids, *([self._store.pid] if self._store else [])]
