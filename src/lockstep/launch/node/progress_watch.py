"""Watch the progress and the steps of one host's workers, and inspect them when a job hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.diagnosis.board import (
    FINISHED,
    GPU_SUFFIX,
    HVD,
    JOINING,
    MET,
    TORCH,
    TORCH_GROUP,
    TRAINER,
    BoardContent,
    BoardReader,
    boards_in,
)
from lockstep.diagnosis.idle_clock import TICK_SECONDS, IdleClock
from lockstep.diagnosis.inspection import WorkerState, glance, inspect_worker, without_board
from lockstep.diagnosis.observed_steps import ProcessSteps
from lockstep.diagnosis.oversubscription import Oversubscription
from lockstep.errors import first_line
from lockstep.launch.node.worker_watch import StayingWorkers, Worker, WorkerWatch
from lockstep.launch.protocol.messages import Inspected, Message, NoProgress, Output, PeersLeft, StepsObserved

if TYPE_CHECKING:
    from lockstep.energy.meter import EnergyMeter

STEPS_SECONDS = 1.0  # between two messages of the observed steps
JOINING_TICKS = 5  # until workers that create a process group cannot be about to finish that


class ProgressWatch:
    """The progress of this host's workers, in one generation.

    Args:
        folder: The folder with their boards.
        limit: Seconds without progress or signs of life after which the launcher is notified.
        send: Sends a message to the launcher.
    """

    def __init__(self, folder: Path, limit: float, send: Callable[[Message], Awaitable[None]]) -> None:
        self._folder = folder
        self._limit = limit
        self._send = send
        self._clock = IdleClock(limit)
        self._looking = asyncio.Lock()  # the clock stands during an inspection, which it would take for progress
        self._is_reported = False
        self._left = PeersLeft()
        self._oversubscription: Oversubscription | None = None
        self._observed: tuple[ProcessSteps, ...] = ()
        self._energy: EnergyMeter | None = None

    async def run(self, watched: WorkerWatch) -> None:
        """Watch all workers of this host until cancelled."""
        while True:
            await asyncio.sleep(self._clock.tick_seconds)
            async with self._looking:
                workers = self._workers(watched.processes)
                idle_s = await asyncio.to_thread(self._clock.tick, workers)
            if idle_s >= self._limit and not self._is_reported:
                self._is_reported = True
                await self._send(NoProgress(idle_s, tuple(map(glance, workers))))
            elif self._is_reported and not idle_s:
                self._is_reported = False
                await self._send(NoProgress(0.0))

    async def follow_exits(
        self, watched: WorkerWatch, staying: StayingWorkers, tick_seconds: float = TICK_SECONDS
    ) -> None:
        """Send which workers have left, and whether others cannot continue without them, until cancelled."""
        ticks = 0  # for how many of them all have been joining
        try:
            while True:
                await asyncio.sleep(tick_seconds)
                running = {rank for rank, (_, code) in watched.processes.items() if code is None}
                joining = {
                    board.rank
                    for board in boards_in(self._folder)
                    if board.read().flags & JOINING and psutil.pid_exists(board.pid)
                }
                ticks = ticks + 1 if running and running <= joining else 0
                await self._send_left(PeersLeft(watched.finished, staying.has_lost_peer, ticks >= JOINING_TICKS))
        finally:
            await self._send_left(PeersLeft(watched.finished))

    async def _send_left(self, found: PeersLeft) -> None:
        if found != self._left:
            self._left = found
            await self._send(found)

    async def follow_steps(self, ranks: Set[int]) -> None:
        """Send the steps that are observed in the workers with these ranks, until cancelled, and then the last ones."""
        with suppress(OSError):  # a system that tells nothing of its processors
            self._oversubscription = Oversubscription()
        try:
            self._energy = await asyncio.to_thread(self.start_meter)
            while True:
                await asyncio.sleep(STEPS_SECONDS)
                await self._send_steps(ranks)
        finally:
            await self._send_steps(ranks, is_last=True)
            if self._energy:
                self._energy.close()

    async def _send_steps(self, ranks: Set[int], is_last: bool = False) -> None:
        """Send the steps observed so far, if there are new ones, with what the host's hardware counts."""
        found = []
        for board in boards_in(self._folder):
            with suppress(OSError, ValueError):  # the worker has removed or truncated it
                if board.rank in ranks and (steps := board.steps()):
                    found.append(ProcessSteps(board.rank, board.pid, bool(board.read().flags & MET), steps))
        if tuple(found) != self._observed or is_last:
            self._observed = tuple(found)
            oversubscribed = self._oversubscription is not None and self._oversubscription.check()
            meter, gpus = self._energy, set(self._gpus(ranks))
            joules = await asyncio.to_thread(meter.take, gpus) if meter else {}
            use = tuple(await asyncio.to_thread(meter.gpu_use, gpus)) if meter else ()
            unread = tuple(meter.take_unread() if meter else ())
            await self._send(StepsObserved(self._observed, oversubscribed, joules, unread, use))

    def _gpus(self, ranks: Set[int]) -> Iterator[str]:
        """Yield the PCI addresses of the GPUs of the workers with these ranks."""
        for path in self._folder.glob(f"*{GPU_SUFFIX}"):
            with suppress(OSError):  # removed
                if int(path.name.partition("-")[0]) in ranks:
                    yield path.read_text()

    def have_not_met(self, ranks: Set[int]) -> bool:
        """Return whether the workers with these ranks have imported torch, and none has joined a process group."""
        boards = [board for board in boards_in(self._folder) if board.rank in ranks and board.read().flags & TORCH]
        return {board.rank for board in boards} == ranks and not any(board.read().flags & MET for board in boards)

    def _workers(self, processes: Mapping[int, tuple[int, int | None]]) -> list[BoardContent]:
        """Return what the boards of the workers that must make progress show.

        Those in a process group; all of this host, if none has a group yet, or all publish something: others may wait
        for them to create it.
        """
        boards = [board.read() for board in boards_in(self._folder)]
        workers = [board for board in boards if not board.flags & FINISHED]
        if {worker.rank for worker in workers} != processes.keys():
            silent = sorted(processes.keys() - {board.rank for board in boards})
            others = [*workers, *(BoardContent(processes[rank][0], rank) for rank in silent)] if silent else []
            workers = [worker for worker in workers if worker.flags & (TRAINER | HVD | TORCH_GROUP)] or others
        if {worker.rank for worker in workers} - processes.keys():  # of a launcher that is a worker, such as torchrun
            return []
        return workers

    async def report_late(self, workers: Sequence[Worker], seconds: float, only_blocked: bool) -> list[Worker]:
        """Print what workers do that have not left their generation, and will be killed; return them.

        Args:
            only_blocked: Leave out workers that do not hold the GIL.
        """
        from lockstep.diagnosis.explanation import describe_worker

        found = await self.inspect({worker.rank: (worker.child.pid, None) for worker in workers})
        states = {state.rank: state for state in found.workers if state.holds_gil or not only_blocked}
        late = [worker for worker in workers if worker.rank in states]
        head = f"lockstep: killed, because it has not left its generation within {seconds:g} s:"
        for worker in late:
            await self._send(Output(worker.rank, "stderr", f"{head} {describe_worker(states[worker.rank])}\n"))
        return late

    async def inspect(self, ranks: Mapping[int, tuple[int, int | None]]) -> Inspected:
        """Return the state of all workers, or an error.

        Args:
            ranks: By rank, the worker's process, and its exit code if it has exited.
        """
        try:
            async with self._looking:
                return Inspected(await self._states(ranks))
        except Exception as error:  # the launcher must get this failure, whatever it is
            return Inspected((), error=f"{type(error).__name__}: {first_line(error)}")

    async def _states(self, ranks: Mapping[int, tuple[int, int | None]]) -> tuple[WorkerState, ...]:
        boards: dict[int, BoardReader] = {}
        # A worker may be a shell script, whose child has the process group; loader processes have none.
        for board in sorted(
            boards_in(self._folder), key=lambda board: (psutil.pid_exists(board.pid), board.read().is_judged)
        ):
            if board.read().is_judged or board.pid == ranks.get(board.rank, (0, None))[0]:
                boards[board.rank] = board
        running = [board for rank, board in boards.items() if rank in ranks and ranks[rank][1] is None]
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            found = await asyncio.gather(
                *(asyncio.get_running_loop().run_in_executor(pool, inspect_worker, board) for board in running)
            )
        signaled = {state.pid for state in found if not state.has_answered}
        await asyncio.to_thread(self._clock.resume, [board.read() for board in running], signaled)
        states = {state.rank: state for state in found}
        for rank, (pid, code) in ranks.items():
            if code is not None:
                states[rank] = WorkerState(rank, exit_code=code)
            else:
                states.setdefault(rank, without_board(rank, pid))
        return tuple(states[rank] for rank in sorted(states))

    @staticmethod
    def start_meter() -> EnergyMeter:
        from lockstep.energy.counters import find_counters
        from lockstep.energy.meter import EnergyMeter

        return EnergyMeter(find_counters())
