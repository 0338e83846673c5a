"""Watch the progress of one host's workers, and inspect them when a job hangs.

A host stands still if none of its workers reports progress and none shows a sign of life. A sign of life is CPU time
of a worker's descendants, files read or written, or CPU time of the worker itself while its stack changes: an
evaluation, a checkpoint or a compilation may take as long as it needs. Workers in a collective are not asked for signs:
they may spin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from lockstep.diagnosis.board import BoardContent, BoardReader, boards_in
from lockstep.diagnosis.inspection import WorkerState, inspect_worker, without_board
from lockstep.diagnosis.proc import Activity, activity
from lockstep.launch.protocol.messages import Inspected, Message, Moving, Standstill

TICK_SECONDS = 1.0
SAMPLES = 20  # of the signs of life, within the time limit; the stack is compared at each tick
CPU_SHARE = 0.05  # of one core
STORAGE_BYTES_PER_SECOND = 50e3  # more than logs take


@dataclass
class _Life:
    """The last sample of a worker."""

    time: float
    own: Activity
    tree: Activity


class ProgressWatch:
    """The progress of this host's workers, for one start.

    Args:
        folder: The folder with their boards.
        limit: Seconds without progress or signs of life after which the launcher hears of it.
        send: Sends a message to the launcher.
    """

    def __init__(self, folder: Path, limit: float, send: Callable[[Message], Awaitable[None]]) -> None:
        self._folder = folder
        self._limit = limit
        self._send = send
        self._marks: dict[int, tuple[int, ...]] = {}
        self._lives: dict[int, _Life] = {}
        self._fingerprints: dict[int, int] = {}
        self._changed: set[int] = set()  # processes whose stacks have changed since the last sample
        self._idle = 0.0
        self._is_reported = False

    async def run(self) -> None:
        """Watch until cancelled."""
        tick = min(TICK_SECONDS, self._limit / SAMPLES)
        before, sampled = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            self._idle += min(now - before, 2 * tick)  # this process may have been suspended
            before = now
            boards = [board for board in boards_in(self._folder) if board.read().is_judged]
            if not boards or self._has_moved(boards):
                await self._progressed()
                continue
            if now - sampled >= self._limit / SAMPLES:
                sampled = now
                if await asyncio.to_thread(self._any_alive, boards):
                    await self._progressed()
            if self._idle >= self._limit and not self._is_reported:
                self._is_reported = True
                await self._send(Standstill(self._idle))

    async def _progressed(self) -> None:
        self._idle = 0.0
        if self._is_reported:
            self._is_reported = False
            await self._send(Moving())

    def _has_moved(self, boards: list[BoardReader]) -> bool:
        marks: dict[int, tuple[int, ...]] = {}
        for board in boards:
            progress = board.read()
            if progress.fingerprint != self._fingerprints.get(board.pid, progress.fingerprint):
                self._changed.add(board.pid)
            self._fingerprints[board.pid] = progress.fingerprint
            marks[board.pid] = (progress.count, progress.enqueued, progress.completed)
        moved, self._marks = marks != self._marks, marks
        return moved

    def _any_alive(self, boards: list[BoardReader]) -> bool:
        """Return whether any worker that is not in a collective does something."""
        alive = [self._is_alive(board) for board in boards if not _is_waiting(board.read())]
        self._changed.clear()
        return any(alive)

    def _is_alive(self, board: BoardReader) -> bool:
        now, before = time.monotonic(), self._lives.get(board.pid)
        own, tree = activity(board.pid, descendants=False), activity(board.pid)
        self._lives[board.pid] = _Life(now, own, tree)
        if before is None:
            return False
        seconds = now - before.time
        others_cpu = (tree.cpu_s - own.cpu_s) - (before.tree.cpu_s - before.own.cpu_s)
        moved_bytes = tree.bytes - before.tree.bytes
        has_children_busy = others_cpu > CPU_SHARE * seconds
        has_io = moved_bytes > STORAGE_BYTES_PER_SECOND * seconds
        is_busy = own.cpu_s - before.own.cpu_s > CPU_SHARE * seconds
        return has_children_busy or has_io or (is_busy and board.pid in self._changed)

    async def inspect(self, ranks: Mapping[int, tuple[int, int | None]]) -> Inspected:
        """Return the state of all workers.

        Args:
            ranks: By rank, the worker's process, and its exit code if it has exited.
        """
        boards: dict[int, BoardReader] = {}
        for board in sorted(boards_in(self._folder), key=lambda board: board.read().is_judged):
            # A worker may be a shell script, whose child has the process group; loader processes have none.
            if board.read().is_judged or board.pid == ranks.get(board.rank, (0, None))[0]:
                boards[board.rank] = board
        running = [board for rank, board in boards.items() if rank in ranks and ranks[rank][1] is None]
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            found = await asyncio.gather(
                *(asyncio.get_running_loop().run_in_executor(pool, inspect_worker, board) for board in running)
            )
        states = {state.rank: state for state in found}
        for rank, (pid, code) in ranks.items():
            if code is not None:
                states[rank] = WorkerState(rank, exit_code=code)
            else:
                states.setdefault(rank, without_board(rank, pid))
        return Inspected(tuple(states[rank] for rank in sorted(states)))


def _is_waiting(progress: BoardContent) -> bool:
    return progress.enqueued > progress.completed
