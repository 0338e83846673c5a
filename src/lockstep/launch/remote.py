"""A host's node process, as the launcher sees it: how it is started, what it answers, and when it is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lockstep.launch.display import Name
from lockstep.launch.node_job import NodeJob
from lockstep.launch.plan import NodePlan, handed_on
from lockstep.launch.start import StartError, why_not_started
from lockstep.launch.wire import (
    HEARTBEAT_SECONDS,
    LIMIT_BYTES,
    SILENCE_SECONDS,
    STANDSTILL_SECONDS,
    bytes_of,
    pack,
    receive,
)

CLOSE_SECONDS = 2.0
LAST_WORDS_BYTES = 1 << 13
STAGES = ("here", "reached", "met", "started")  # of a start, in this order
Show = Callable[[int, Name, bytes], Awaitable[None]]


class Remote:
    """A host's node process, as the launcher sees it: for one start of the workers, or several."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
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
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}

    @property
    def is_lost(self) -> bool:
        """Whether nothing will come from it any more."""
        return self._is_lost or (self._process is not None and self._process.returncode is not None)

    @property
    def is_free(self) -> bool:
        """Whether it can be had for another start of the workers: it is there, and those that it had have ended."""
        return not self.is_lost and self.answer("ended").done()

    async def start(self, job: NodeJob) -> None:
        """Hand it the job, and start it first where it is not there yet."""
        if self._process is None:
            await self._start(job)
        self.send(asdict(replace(job, stdout=self._stdout if job.stdout >= 0 else -1)))

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

    def answer(self, kind: str) -> asyncio.Future[dict[str, Any]]:
        """The message of a kind, when it comes; a failure if the node process ends before."""
        return self._answers.setdefault(kind, asyncio.get_running_loop().create_future())

    @property
    def is_in_trouble(self) -> bool:
        """Whether this host could not start its part."""
        answers = [self.answer(kind) for kind in STAGES]
        return any(answer.done() and answer.exception() for answer in answers)

    def outcome(self) -> dict[str, Any]:
        """What has been told by now of its part's end."""
        if self.answer("ended").done():
            return self.answer("ended").result()
        return {"lost": "its workers have failed, and it did not say how"} if self.answer("failing").done() else {}

    def send(self, message: dict[str, Any]) -> None:
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
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        if self._process and self._process.returncode is None:
            self._process.kill()
            with suppress(TimeoutError):  # asyncio waits for the pipes, too, which a process that it has left may hold
                await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        if self._process and self._process.stdin:
            self._process.stdin.close()
            with suppress(OSError):  # a broken pipe, which asyncio would print as an error that nobody has seen
                await asyncio.wait_for(self._process.stdin.wait_closed(), CLOSE_SECONDS)

    async def _listen(self) -> None:
        assert self._process
        assert self._process.stdout
        while message := await receive(self._process.stdout):
            self._heard = time.monotonic()
            match message.get("is"):
                case "output":
                    rank = self._first_rank + message["worker"]
                    await self._show(rank, message["name"], bytes_of(message["text"]))
                case "error":
                    self._lost(f"{self.node.host} {message['text']}")
                case str(kind) if kind != "alive":
                    if kind == "started":
                        self._first_rank = message["first_rank"]
                    self._resolve(kind, message)
        code = await self._process.wait()
        await self._tasks[1]
        said = self._last_words.decode(errors="replace")
        if not self.answer("here").done():
            self._lost(why_not_started(self.node, code, said))
        elif not self.answer("started").done():
            self._lost(f"lost {self.node.host} while its workers were started: {said.strip() or f'exit code {code}'}")
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
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if time.monotonic() - asleep > STANDSTILL_SECONDS:  # this process was stopped, and could hear nobody
                self._heard = time.monotonic()
            self.send({"do": "alive"})
            if time.monotonic() - self._heard > SILENCE_SECONDS and self.answer("here").done():
                self._lost(f"has not been heard of for {SILENCE_SECONDS:g} s: the host or the way to it is down")

    def _watch_over(self, task: asyncio.Task[Any]) -> None:
        """A mistake of ours must not become a silent wait."""
        if not task.cancelled() and (error := task.exception()):
            self._lost(f"its messages could not be understood: {error!r}")

    def _resolve(self, kind: str, message: dict[str, Any]) -> None:
        if not self.answer(kind).done():
            self.answer(kind).set_result(message)

    def _lost(self, why: str) -> None:
        """No answer will come any more."""
        self._is_lost = True
        lost = why or "its part of the launcher has ended unexpectedly"
        self._resolve("ended", {"is": "ended", "lost": lost, "seen": time.monotonic()})
        early = why if self.node.host in why else f"lost {self.node.host}: {why}"
        for kind in STAGES:
            if not self.answer(kind).done():
                self.answer(kind).set_exception(StartError(early))
                self.answer(kind).exception()  # it need not be asked for
