"""A host's node process, as the launcher sees it: how it is started, what it answers, and when it is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lockstep.launch.controller.start_errors import StartError, killed, why_not_started
from lockstep.launch.output.display import Name
from lockstep.launch.plan.job_plan import NodePlan, handed_on
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.messages import (
    LIMIT_BYTES,
    Alive,
    Ended,
    Failing,
    Here,
    Message,
    Met,
    NodeJob,
    Output,
    Reached,
    SlotWorkerEnded,
    Started,
    Trouble,
    pack,
    receive,
)
from lockstep.launch.protocol.pipes import bytes_of

LAST_WORDS_BYTES = 1 << 13
STAGES = (Here, Reached, Met, Started)  # of a start, in this order
T = TypeVar("T", bound=Message)
Show = Callable[[int, Name, bytes], Awaitable[None]]


@dataclass(frozen=True)
class Lost:
    """A node process that is gone, and why; `seen` when, where that was before other workers were ended for it."""

    why: str
    seen: float | None = None


class Remote:
    """A host's node process, as the launcher sees it: for one start of the workers, or several.

    `end` is done when it is known how its part has ended, or that it is lost.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._timings = Timings()
        self._stdout = -1  # the node process's descriptor that workers write to directly
        self._heard = time.monotonic()
        self._last_words = b""
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_lost = False

    def take(self, index: int, node: NodePlan, show: Show) -> None:
        """Have it for one start of the workers.

        Args:
            index: Its number among the nodes of this launcher.
            show: Gets each part of a worker's output: the rank, the stream's name, the bytes; none at its end.
        """
        self.index = index
        self.node = node
        self._show = show
        self._first_rank = 0
        self.exit_codes: dict[int, int] = {}  # of an elastic job's workers, by number
        self._answers: dict[type[Message], asyncio.Future[Any]] = {}
        self.end: asyncio.Future[Ended | Lost] = asyncio.get_running_loop().create_future()

    @property
    def is_lost(self) -> bool:
        """Whether nothing will come from it any more."""
        return self._is_lost or (self._process is not None and self._process.returncode is not None)

    @property
    def is_free(self) -> bool:
        """Whether it can be had for another start of the workers: it is there, and those that it had have ended."""
        return not self.is_lost and self.end.done()

    async def start(self, job: NodeJob) -> None:
        """Hand it the job, and start it first where it is not there yet."""
        self._timings = job.timings
        if self._process is None:
            await self._start(job)
        self.send(replace(job, stdout=self._stdout if job.stdout >= 0 else -1))

    async def _start(self, first: NodeJob) -> None:
        # a copy, above the three streams that the node process has for itself
        stdout = os.dup(first.stdout) if first.stdout >= 0 else -1
        environment = handed_on(os.environ) if self.node.is_here else dict(os.environ)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.node.start,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=LIMIT_BYTES,
                env=environment,
                pass_fds=[stdout] if stdout >= 0 else [],
                start_new_session=True,  # what a terminal's Ctrl-C means is the launcher's to say
            )
        except OSError as error:
            raise StartError(f"cannot run {self.node.start[0]}: {error.strerror}") from None
        finally:
            if stdout >= 0:
                os.close(stdout)
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(each) for each in (self._listen(), self._overhear())]
        if first.heartbeat:
            self._tasks.append(asyncio.create_task(self._beat()))
        for task in self._tasks:
            task.add_done_callback(self._watch_over)
        self._stdout = stdout

    def answer(self, kind: type[T]) -> asyncio.Future[T]:
        """The message of a kind, when it comes; a failure if the node process ends before."""
        return self._answers.setdefault(kind, asyncio.get_running_loop().create_future())

    @property
    def is_in_trouble(self) -> bool:
        """Whether this host could not start its part."""
        answers = [self.answer(kind) for kind in STAGES]
        return any(answer.done() and answer.exception() for answer in answers)

    def outcome(self) -> Ended | Lost | None:
        """What has been told by now of its part's end."""
        if self.end.done():
            return self.end.result()
        return Lost("its workers failed without an error message") if self.answer(Failing).done() else None

    def send(self, message: Message) -> None:
        if self._process and self._process.stdin and not self._process.stdin.is_closing():
            self._process.stdin.write(pack(message))

    async def close(self) -> None:
        """End what is left of the connection."""
        for task in self._tasks:
            task.cancel()
        if self._process and self._process.returncode is None:
            if self._process.stdin:
                self._process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._timings.close)
        if self._process and self._process.returncode is None:
            self._process.kill()
            with suppress(TimeoutError):  # asyncio waits for the pipes, too, which a process that it has left may hold
                await asyncio.wait_for(self._process.wait(), self._timings.close)
        if self._process and self._process.stdin:
            self._process.stdin.close()
            with suppress(OSError):  # a broken pipe, which asyncio would print as an error that nobody has seen
                await asyncio.wait_for(self._process.stdin.wait_closed(), self._timings.close)
        if self._process:  # its other streams, too, which asyncio keeps open as long as any process has them
            self._process._transport.close()  # type: ignore[attr-defined]

    async def _listen(self) -> None:
        assert self._process
        assert self._process.stdout
        while message := await receive(self._process.stdout):
            self._heard = time.monotonic()
            match message:
                case Output(worker, "stdout" | "stderr" as name, text):
                    await self._show(self._first_rank + worker, name, bytes_of(text))
                case Trouble(text):
                    self._lost(f"{self.node.host} {text}")
                case SlotWorkerEnded(worker, code):
                    self.exit_codes[worker] = code
                case Ended():
                    self._resolve(self.end, message)
                case Here() | Reached() | Met() | Started() | Failing():
                    if isinstance(message, Started):
                        self._first_rank = message.first_rank
                    self._resolve(self.answer(type(message)), message)
        exit_code = await self._process.wait()
        await self._tasks[1]
        said = self._last_words.decode(errors="replace")
        if not self.answer(Here).done():
            self._lost(why_not_started(self.node, exit_code, said))
        elif not self.answer(Started).done():
            how = killed(exit_code) or f"exited: {said.strip() or f'exit code {exit_code}'}"
            self._lost(f"the node process on {self.node.host} {how} while its workers were starting")
        else:
            self._lost("")

    async def _overhear(self) -> None:
        """What ssh and its like, or Python there, say on their own account."""
        assert self._process
        assert self._process.stderr
        while said := await self._process.stderr.read(LAST_WORDS_BYTES):
            self._last_words = (self._last_words + said)[-LAST_WORDS_BYTES:]

    async def _beat(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(self._timings.heartbeat)
            if time.monotonic() - asleep > self._timings.standstill:  # this process was stopped, and could hear nobody
                self._heard = time.monotonic()
            self.send(Alive())
            silence = self._timings.silence
            if time.monotonic() - self._heard > silence and self.answer(Here).done():
                self._lost(f"has been silent for {silence:g} s: the host or the network is down")

    def _watch_over(self, task: asyncio.Task[Any]) -> None:
        """A mistake of ours must not become a silent wait."""
        if not task.cancelled() and (error := task.exception()):
            self._lost(f"its messages are invalid: {error!r}")

    def _resolve(self, answer: asyncio.Future[Any], message: Message | Lost) -> None:
        if not answer.done():
            answer.set_result(message)

    def _lost(self, why: str) -> None:
        """No answer will come any more."""
        self._is_lost = True
        self._resolve(self.end, Lost(why or "its part of the launcher exited unexpectedly", time.monotonic()))
        early = why if self.node.host in why else f"lost {self.node.host}: {why}"
        for kind in STAGES:
            if not self.answer(kind).done():
                self.answer(kind).set_exception(StartError(early))
                self.answer(kind).exception()  # it need not be asked for
