"""Watch one host's workers: detect the first failure, and end the others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.mapping import from_mapping
from lockstep.errors import ConfigError
from lockstep.launch.node.worker_starter import Child, signal_group
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import WorkerFailure


@dataclass
class Worker:
    """A process of the job; `seen` is when its exit with `code` was detected."""

    rank: int
    child: Child
    error_file: Path
    code: int | None = None
    seen: float = 0.0


class WorkerWatch:
    """The workers of one start, until all have exited.

    Args:
        changed: Set whenever a child of this process has exited.
    """

    def __init__(self, workers: Sequence[Worker], changed: asyncio.Event, timings: Timings) -> None:
        self._workers = workers
        self._timings = timings
        self._changed = changed
        self.is_ended = False  # by `end`
        self.is_asked_to_stop = False  # then `wait` ends no worker: the launcher sets the time limit

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers, which end the processes that they started themselves."""
        self.is_asked_to_stop |= number == signal.SIGTERM
        for worker in self._living():
            with suppress(OSError):
                os.kill(worker.child.pid, number)

    @property
    def processes(self) -> dict[int, tuple[int, int | None]]:
        """By rank, each worker's process, and its exit code if it has exited."""
        self._living()
        return {worker.rank: (worker.child.pid, worker.code) for worker in self._workers}

    async def wait(self, report_failing: Callable[[], Awaitable[None]]) -> list[WorkerFailure]:
        """Wait until all workers have exited; if one fails, end the others.

        Args:
            report_failing: Called at the first failure, so that other hosts end their workers at the same time.

        Returns:
            The failures, without those of workers that were ended; none if `end` was called before a failure.
        """
        while self._living() and (self.is_asked_to_stop or not self._failed()):
            await self._change()
        if self.is_ended or not self._failed():
            return []
        await report_failing()
        await self._until_ended(self._timings.settle)  # the worker that caused other failures may exit after them
        failed = self._failed()
        await self.end(self._timings.worker_end)
        return [_failure_of(worker) for worker in failed]

    async def end(self, seconds: float) -> None:
        """End all workers: SIGTERM, then SIGKILL after `seconds`; with 0, only SIGKILL."""
        self.is_ended = True
        for number in (signal.SIGTERM, signal.SIGKILL) if seconds else (signal.SIGKILL,):
            for worker in self._living():
                signal_group(worker.child, number)
            await self._until_ended(seconds or self._timings.worker_end)

    def _living(self) -> list[Worker]:
        for worker in self._workers:
            if worker.code is None and (code := worker.child.poll()) is not None:
                worker.code, worker.seen = code, time.monotonic()
        return [worker for worker in self._workers if worker.code is None]

    def _failed(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code]

    async def _until_ended(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._living():
                    await self._change()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()


def _failure_of(worker: Worker) -> WorkerFailure:
    """Describe a failure for the launcher, with the worker's own message if it reported one to Lockstep."""
    now, code = time.monotonic(), worker.code or 0
    try:
        error = json.loads(worker.error_file.read_text())["lockstep"]
        fields = {name: error[name] for name in ("text", "lost_peer", "final")}
        fields |= {"rank": worker.rank, "code": error["exit_code"], "age": now - error["monotonic_seconds"]}
        return from_mapping(WorkerFailure, fields, str(worker.error_file))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        ConfigError,
    ):  # a script may write anything to this file
        return WorkerFailure(worker.rank, code, now - worker.seen)
