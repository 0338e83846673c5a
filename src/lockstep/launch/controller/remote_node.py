"""The launcher's side of a host's node process: start it, await its answers, detect its loss, reuse it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from lockstep.diagnosis.inspection import WorkerState
from lockstep.launch.controller.host_process import start_process
from lockstep.launch.controller.start_errors import StartError, killed, why_not_started
from lockstep.launch.output import Name
from lockstep.launch.plan.job_plan import NodePlan, OtherNodes
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol import messages
from lockstep.launch.staging.job_copies import JobCopies

DETECT_SECONDS = 0.01
INSPECTION_SECONDS = 10.0
STAGES = (messages.NodeReady, messages.Reached, messages.Started)  # the answers during a start, in this order
T = TypeVar("T", bound=messages.Message)
Show = Callable[[int, Name, bytes], Awaitable[None]]
Observe = Callable[[messages.StepsObserved], None]


@dataclass(frozen=True)
class Lost:
    """A node process that disconnected.

    Args:
        why: The reason, for the message.
        seen: The monotonic time when it was detected.
    """

    why: str
    seen: float = field(default_factory=time.monotonic)


class Remote:
    """A host's node process, for one or several generations of the workers.

    `end` is done when the outcome of the host's part is known, or the node process has disconnected.
    """

    def __init__(self) -> None:
        self._process: messages.HostProcess | None = None
        self._timings = Timings()
        self._stdout = -1  # the node process's descriptor that workers write to directly
        self._heard = time.monotonic()
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_lost = self._has_disconnected = False

    def take(
        self,
        index: int,
        node: NodePlan,
        show: Show,
        observe: Observe = lambda steps: None,
        others: OtherNodes | None = None,
    ) -> None:
        """Assign it to one generation of the workers.

        Args:
            index: Its number among the nodes of this launcher.
            show: Called with each chunk of a worker's output: rank, stream name, bytes; no bytes at its end.
            observe: Called with the steps of its workers.
            others: As in `JobPlan`.
        """
        self.index = index
        self.node = node
        self._others = others
        self._show = show
        self._observe = observe
        self._answers: dict[type[messages.Message], asyncio.Future[Any]] = {}
        self.end: asyncio.Future[messages.Ended | Lost] = asyncio.get_running_loop().create_future()
        self.idle_s = 0.0  # how long its workers have made no progress, while they stand still
        self.glance: tuple[WorkerState, ...] = ()  # their states at that time, as far as known without an inspection
        self.left = messages.PeersLeft()
        self._inspecting = asyncio.Lock()
        self.no_progress, self.progressing = asyncio.Event(), asyncio.Event()
        self.progressing.set()

    @property
    def is_lost(self) -> bool:
        """Whether it will send nothing more."""
        return self._is_lost or (self._process is not None and self._process.exit_code is not None)

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and will send nothing of an earlier job any more: a spare may not be ready yet."""
        return not self.is_lost and (self.end.done() or self.answer(messages.NodeReady).done())

    @property
    def is_free(self) -> bool:
        """Whether it can be reused for another generation: it runs, and its previous workers have exited."""
        return not self.is_lost and self.end.done()

    async def start(self, job: messages.NodeJob) -> None:
        """Send it the job; start it first if it does not run yet."""
        self._timings = job.timings
        if self._process is None:
            await self._start(job)
        self.send(replace(job, stdout=self._stdout if job.stdout >= 0 else -1))

    async def _start(self, first: messages.NodeJob) -> None:
        # a copy, numbered above the node process's own three streams
        stdout = os.dup(first.stdout) if first.stdout >= 0 else -1
        try:
            pass_fds = [stdout] if stdout >= 0 else []
            if self.node.is_relayed and self._others:
                self._process = await self._others.start(self.node.host)
            else:
                self._process = await start_process(self.node.start, self.node.is_here, pass_fds)
        finally:
            if stdout >= 0:
                os.close(stdout)
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._listen())]
        if first.heartbeat:
            self._tasks.append(asyncio.create_task(self._beat()))
        for task in self._tasks:
            task.add_done_callback(self._watch_over)
        self._stdout = stdout

    def answer(self, kind: type[T]) -> asyncio.Future[T]:
        """Return a future of the next message of a kind; it fails if the node process exits first."""
        return self._answers.setdefault(kind, asyncio.get_running_loop().create_future())

    @property
    def is_in_trouble(self) -> bool:
        """Whether this host failed to start its part."""
        answers = [self.answer(kind) for kind in STAGES]
        return any(answer.done() and answer.exception() for answer in answers)

    def outcome(self) -> messages.Ended | Lost | None:
        """Return what is known so far about the end of its part."""
        if self.end.done():
            return self.end.result()
        return Lost("its workers failed without an error message") if self.answer(messages.Failing).done() else None

    async def inspect(self) -> messages.Inspected:
        """Return the states of its workers, or an error if it does not answer in time."""
        async with self._inspecting:
            answer = self._answers[messages.Inspected] = asyncio.get_running_loop().create_future()
            self.send(messages.Inspect())
            with suppress(TimeoutError):
                return await asyncio.wait_for(answer, INSPECTION_SECONDS)
            return messages.Inspected((), error=f"no answer within {INSPECTION_SECONDS:g} s")

    def send(self, message: messages.Message) -> None:
        if self._process:
            self._process.send(messages.pack(message))

    async def close(self) -> None:
        """Close the connection, and kill the node process if it does not exit in time."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)  # only one may read
        if self._process:
            timings = self._timings
            await self._process.close(timings.job_end if self._has_disconnected else timings.close)

    async def _listen(self) -> None:
        assert self._process
        while message := await messages.receive(self._process):
            self._heard = time.monotonic()
            match message:
                case messages.Output(rank, "stdout" | "stderr" as name, text):
                    await self._show(rank, name, messages.bytes_of(text))
                case messages.StepsObserved():
                    self._observe(message)
                case messages.NodeFailure(text):
                    self._lost(f"{self.node.host} {text}")
                case messages.Ended():
                    self._resolve(self.end, message)
                case messages.NoProgress(seconds, workers):
                    self.idle_s, self.glance = seconds, workers
                    stands, moves = self.no_progress, self.progressing
                    (moves if seconds else stands).clear()
                    (stands if seconds else moves).set()
                case messages.PeersLeft():
                    self.left = message
                case _ if isinstance(message, (*STAGES, messages.Failing, messages.Inspected)):
                    self._resolve(self.answer(type(message)), message)
        self._has_disconnected = True
        if self.answer(messages.Started).done():
            self._lost("")  # before its guard exits, which kills its workers: they may have much memory to free
            return
        exit_code, stderr = await self._process.wait(), self._process.last_lines
        if self.answer(messages.NodeReady).done():
            how = killed(exit_code) or f"exited: {stderr.strip() or f'exit code {exit_code}'}"
            self._lost(f"the node process on {self.node.host} {how} while its workers were starting")
        else:
            self._lost(why_not_started(self.node, exit_code, stderr))

    async def _beat(self) -> None:
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(self._timings.heartbeat)
            if time.monotonic() - asleep > self._timings.standstill:  # this process was suspended
                self._heard = time.monotonic()
            self.send(messages.Alive())
            silence = self._timings.silence
            if time.monotonic() - self._heard > silence and self.answer(messages.NodeReady).done():
                self._lost(f"has been silent for {silence:g} s: the host or the network is down")

    def _watch_over(self, task: asyncio.Task[Any]) -> None:
        """Handle an error of this module, so that it does not become a silent wait."""
        if not task.cancelled() and (error := task.exception()):
            self._lost(f"its messages are invalid: {error!r}")

    def _resolve(self, answer: asyncio.Future[Any], message: messages.Message | Lost) -> None:
        if not answer.done():
            answer.set_result(message)

    def _lost(self, why: str) -> None:
        """Fail all answers that are still awaited."""
        self._is_lost = True
        self._resolve(self.end, Lost(why or "its part of the launcher exited unexpectedly"))
        early = why if self.node.host in why else f"lost {self.node.host}: {why}"
        for kind in STAGES:
            if not self.answer(kind).done():
                self.answer(kind).set_exception(StartError(early))
                self.answer(kind).exception()  # mark it as retrieved


class NodePool:
    """The node processes of a launcher that are not in use, by `NodePlan.key`.

    The next generation reuses their connections and the modules that they have loaded.
    """

    def __init__(self) -> None:
        self.copies = JobCopies()  # on their hosts
        self._free: dict[tuple[str, ...], Remote] = {}
        self._ending: list[tuple[tuple[str, ...], asyncio.Task[None]]] = []

    async def take(
        self,
        nodes: Sequence[NodePlan],
        show: Show,
        observe: Observe = lambda steps: None,
        others: OtherNodes | None = None,
    ) -> list[Remote]:
        """Return the hosts' node processes; a new one, not started yet, where none can be reused."""
        if self._free:
            await asyncio.sleep(DETECT_SECONDS)  # let asyncio detect those that have exited
        keys = {node.key for node in nodes}
        while True:
            for key in [each for each in keys if each in self._free and not self._free[each].is_usable]:
                self._let_end(self._free.pop(key))
            if not (ending := [task for key, task in self._ending if key in keys]):
                break
            await self._wait_for(ending)
        remotes = []
        for index, node in enumerate(nodes):
            remote = self._free.pop(node.key, None) or Remote()
            remote.take(index, node, show, observe, others)
            remotes.append(remote)
        for remote in self._free.values():
            last = remote.end.result() if remote.end.done() else None  # else a spare
            if isinstance(last, messages.Ended) and last.staying:
                remote.send(messages.End(0.0))  # the workers that wait there have no place in this generation
        return remotes

    def holds(self, node: NodePlan) -> bool:
        """Whether a node process on this host waits for a job."""
        return node.key in self._free and not self._free[node.key].is_lost

    def hold(self, remotes: Sequence[Remote]) -> None:
        """Keep node processes that prepare a job, and start no worker."""
        self._free |= {remote.node.key: remote for remote in remotes}

    async def give_back(self, remotes: list[Remote], keep: bool) -> None:
        """Take node processes back from a job, and end those that are not kept.

        With `keep`, the job goes on while lost ones end: ssh to such a host may take its time.
        """
        kept = {remote.node.key: remote for remote in remotes if keep and remote.is_free}
        ending = [(remote, self._let_end(remote)) for remote in remotes if remote.node.key not in kept]
        self._free |= kept
        await self._wait_for([task for remote, task in ending if not (keep and remote.is_lost)])

    async def close(self) -> None:
        """End all node processes, and remove the copies of `--stage`."""
        while self._free:
            self._let_end(self._free.popitem()[1])
        await self._wait_for([task for _, task in self._ending])
        await self.copies.close()

    def _let_end(self, remote: Remote) -> asyncio.Task[None]:
        task = asyncio.create_task(remote.close())
        self._ending.append((remote.node.key, task))
        return task

    async def _wait_for(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until some have ended; if this is cancelled, `close` still waits for them."""
        if tasks:
            await asyncio.wait(tasks)
        self._ending = [(key, task) for key, task in self._ending if not task.done()]
        for task in tasks:
            task.result()
