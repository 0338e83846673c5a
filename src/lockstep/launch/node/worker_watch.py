"""Watch one host's workers: detect the first failure, and end the others, except those that stay.

Workers that can stay when others are lost connect to the node process; the other side is `lockstep.world.generations`.
Any process of this host could connect, so each proves that it has the secret in its variables.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.mapping import from_mapping
from lockstep.config.values import NOTICE
from lockstep.errors import ConfigError
from lockstep.files.untrusted import parse_json
from lockstep.launch.node.worker_starter import Child, signal_group
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import Message, Output, WorkerFailure, reader_of, text_of
from lockstep.world import MemberState
from lockstep.world.interfaces import LOOPBACK

CHUNK_BYTES = 1 << 16  # of a worker's output, in a message
INTRODUCTION_SECONDS = 5.0


@dataclass(eq=False)
class Worker:
    """A process of the job; `seen` is when its exit with `code` was detected.

    Args:
        number: Identifies it among all workers of this host, also earlier ones.
        variables: Those that change from one generation to the next.
        child: The process, once it is started.
        carriers: The tasks that read its output.
        is_ended: It has been sent a signal that ends it.
    """

    number: int
    local_rank: int
    variables: Mapping[str, str] = field(default_factory=dict)
    child: Child = field(init=False)
    carriers: tuple[asyncio.Task[None], ...] = ()
    is_ended: bool = False
    code: int | None = field(default=None, init=False)
    seen: float = field(default=0.0, init=False)

    @property
    def rank(self) -> int:
        return int(self.variables["HOROVOD_RANK"])

    @property
    def error_file(self) -> Path:
        return Path(self.variables["TORCHELASTIC_ERROR_FILE"])

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.code is None and (code := self.child.poll()) is not None:
            self.code, self.seen = code, time.monotonic()
        return self.code


@dataclass
class _Connection:
    """A worker's connection.

    Args:
        must_lead: Rank 0 of the next generation has to be a worker that stays.
        joined: How many generations it has joined later.
    """

    writer: asyncio.StreamWriter
    must_lead: bool
    state: MemberState = MemberState.STAYS
    joined: int = 0

    def send(self, message: Mapping[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")


class StayingWorkers:
    """The workers that stay, by their numbers.

    Args:
        changed: Set whenever a worker says something.
    """

    def __init__(self, changed: asyncio.Event) -> None:
        self.numbers = itertools.count()  # a number is never reused
        self._changed = changed
        self._lines: dict[int, _Connection] = {}
        self._changes: list[Mapping[str, Any]] = []  # of the hosts, since this generation began
        self.have_state = False  # whether rank 0 of the next generation had to be a worker of this one
        self._secret = secrets.token_hex(16)
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin a generation; listen for workers, if this does not listen yet."""
        self._changes = []
        self.have_state = any(line.must_lead for line in self._lines.values())
        self._server = self._server or await asyncio.start_server(self._serve, LOOPBACK, 0)

    def close(self) -> None:
        """Listen no more."""
        if self._server:
            self._server.close()

    def address_for(self, number: int) -> str:
        """Return what a worker needs to connect."""
        assert self._server
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}:{self._secret}:{number}"

    def state(self, number: int) -> MemberState:
        """Return the state of a worker."""
        return self._lines[number].state if number in self._lines else MemberState.ENDS

    def must_lead(self, number: int) -> bool:
        return number in self._lines and self._lines[number].must_lead

    def passes_notices(self, number: int) -> bool:
        """Whether a worker, from an earlier generation, passes signals on to the others."""
        return number in self._lines and self._lines[number].joined > 0 and not self._lines[number].must_lead

    @property
    def has_lost_peer(self) -> bool:
        """Whether a worker has lost the connection to a peer in this generation."""
        return any(line.state in (MemberState.CUT_OFF, MemberState.WAITS) for line in self._lines.values())

    def answer(self, number: int, variables: Mapping[str, str]) -> None:
        """Let a worker that waits continue with these variables; without any, it exits."""
        line = self._lines[number]
        line.state, line.joined = MemberState.STAYS, line.joined + 1
        line.send({"variables": dict(variables)})

    def tell(self, news: Mapping[str, Any]) -> None:
        """Send to all workers that stay: {"over": True} of their generation, or a {"change": KIND} of the hosts."""
        if "change" in news:  # workers that connect later are notified, too
            self._changes.append(news)
        for line in self._lines.values():
            if "over" in news:
                line.state = max(line.state, MemberState.LEAVES)
            line.send(news)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = None
        try:
            # Cancelled at the end of this process, where asyncio would otherwise print a traceback.
            with suppress(OSError, ValueError, TimeoutError, LookupError, TypeError, asyncio.CancelledError):
                async with asyncio.timeout(INTRODUCTION_SECONDS):  # wait_for can lose a cancellation
                    hello = parse_json(await reader.readline())
                if not secrets.compare_digest(str(hello["secret"]), self._secret):
                    return
                if int(hello["worker"]) in self._lines:  # a process that the worker has started has its variables, too
                    return
                number = int(hello["worker"])
                line = self._lines[number] = _Connection(writer, bool(hello["must_lead"]))
                self.have_state |= line.must_lead
                for change in self._changes:
                    line.send(change)
                while text := await reader.readline():
                    line.state = max(line.state, MemberState[parse_json(text)["state"]])
                    self._changed.set()
        finally:
            if number is not None:
                del self._lines[number]
            writer.close()
            self._changed.set()


class WorkerWatch:
    """The workers of one generation, until all have exited or wait for the next one.

    Args:
        changed: Set whenever a child of this process has exited, or one that stays has said something.
    """

    def __init__(
        self, workers: Sequence[Worker], staying: StayingWorkers, changed: asyncio.Event, timings: Timings
    ) -> None:
        self._workers = workers
        self._staying = staying
        self._timings = timings
        self._changed = changed
        self._is_over = False
        self.is_ended = False  # by `end`
        self.is_asked_to_stop = False  # then `wait` ends no worker: the launcher sets the time limit

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers, which end the processes that they started themselves."""
        self.is_asked_to_stop |= number == signal.SIGTERM
        workers = self._living()
        if number in NOTICE:  # a worker that has just started would be ended by it, and all stop if one gets it
            workers = [each for each in workers if self._staying.passes_notices(each.number)] or workers
        for worker in workers:
            with suppress(OSError):
                os.kill(worker.child.pid, number)

    @property
    def processes(self) -> dict[int, tuple[int, int | None]]:
        """By rank, each worker's process, and its exit code if it has exited."""
        self._living()
        return {worker.rank: (worker.child.pid, worker.code) for worker in self._workers}

    async def wait(
        self,
        report_failing: Callable[[], Awaitable[None]],
        report_late: Callable[[Sequence[Worker], float, bool], Awaitable[Sequence[Worker]]],
    ) -> list[WorkerFailure]:
        """Wait until all workers have exited. If one fails or leaves, end the others, but those that stay may leave.

        Args:
            report_failing: Called at the first failure, so that other hosts end their workers at the same time.
            report_late: Called as `report_late(workers, seconds, only_blocked)` if workers that could stay have not
                left in time. It reports those that are to be killed, and returns them: all, or only those that hold
                the GIL.

        Returns:
            The failures, without those of workers that were ended; none if `end` was called before a failure.
        """
        while self._living() and (self.is_asked_to_stop or not (self._failed() or self._is_over or self.waiting())):
            await self._change()
        if self.is_ended or not (self._failed() or self._is_over or self.waiting()):
            return []
        if any(self._state(worker) != MemberState.ENDS for worker in self._living()):
            for worker in self._failed():  # its children hold its connections, too, for whose end its peers wait
                signal_group(worker.child, signal.SIGKILL)
        await report_failing()  # which notifies the workers that can stay; later ones cannot
        # The worker that caused other failures may exit after them.
        await self._until(lambda: not self._busy(), self._timings.settle)
        failed = self._failed()
        await self._end(
            lambda: [each for each in self._busy() if self._state(each) != MemberState.LEAVES],
            self._timings.worker_end,
        )
        await self._let_leave(report_late)
        await self._end(self._busy, 0.0)
        return [_failure_of(worker) for worker in failed]

    async def _let_leave(
        self,
        report_late: Callable[[Sequence[Worker], float, bool], Awaitable[Sequence[Worker]]],
    ) -> None:
        """Wait until workers that stay have left; kill those that cannot."""
        seconds, blocked = self._timings.leave, self._timings.blocked
        if seconds <= self._timings.worker_end:  # no worker was to stay after this generation
            await self._until(lambda: not self._busy(), seconds)
            return
        if blocked < seconds:
            seconds -= blocked
            await self._until(lambda: not self._busy(), blocked)
            # A worker without which the job's state may be lost has all the time.
            is_safe = any(self._staying.must_lead(each.number) for each in self.waiting())
            if slow := [each for each in self._leaving() if is_safe or not self._staying.must_lead(each.number)]:
                stuck = await report_late(slow, blocked, True)
                await self._end(lambda: [each for each in self._busy() if each in stuck], 0.0)
        await self._until(lambda: not self._busy(), seconds)
        if late := self._leaving():
            await report_late(late, self._timings.leave, False)

    def leave(self) -> None:
        """Let `wait` act as if a worker had failed, because one on another host has."""
        self._is_over = True
        self._changed.set()

    async def end(self, seconds: float) -> None:
        """End all workers: SIGTERM, then SIGKILL after `seconds`; with 0, only SIGKILL."""
        self.is_ended = True
        await self._end(self._living, seconds)

    def waiting(self) -> list[Worker]:
        """Return the workers that wait for the next generation."""
        return [worker for worker in self._living() if self._state(worker) == MemberState.WAITS]

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._living() if self._state(worker) != MemberState.WAITS]

    def _leaving(self) -> list[Worker]:
        return [worker for worker in self._living() if self._state(worker) == MemberState.LEAVES]

    def _state(self, worker: Worker) -> MemberState:
        return self._staying.state(worker.number)

    def _living(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.poll() is None]

    def _failed(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code]

    @property
    def finished(self) -> tuple[int, ...]:
        """The ranks that have exited with code 0 by themselves, in this order."""
        left = [worker for worker in self._workers if worker.code == 0 and not worker.is_ended]
        return tuple(worker.rank for worker in sorted(left, key=lambda worker: worker.seen))

    async def _end(self, which: Callable[[], Sequence[Worker]], seconds: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL) if seconds else (signal.SIGKILL,):
            for worker in which():
                worker.is_ended = True
                signal_group(worker.child, number)
            await self._until(lambda: not which(), seconds or self._timings.worker_end)

    async def _until(self, is_true: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not is_true():
                    await self._change()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()


async def carry(worker: Worker, name: str, descriptor: int, send: Callable[[Message], Awaitable[None]]) -> None:
    """Send a stream of a worker's output to the launcher, until it ends."""
    reader = await reader_of(descriptor)
    while chunk := await reader.read(CHUNK_BYTES):
        await send(Output(worker.rank, name, text_of(chunk)))
    await send(Output(worker.rank, name, ""))


def _failure_of(worker: Worker) -> WorkerFailure:
    """Describe a failure for the launcher, with the worker's own message if it reported one to Lockstep."""
    now, code = time.monotonic(), worker.code or 0
    try:
        error = json.loads(worker.error_file.read_text())["lockstep"]
        fields = {name: error[name] for name in ("text", "lost_peer", "final")}
        fields |= {"rank": worker.rank, "code": error["exit_code"], "age": now - error["monotonic_seconds"]}
        return from_mapping(WorkerFailure, fields, str(worker.error_file))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):  # a script may write anything to this file
        return WorkerFailure(worker.rank, code, now - worker.seen)
