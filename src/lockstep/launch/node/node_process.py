"""The node process: start a host's workers, forward their output, and clean up after them.

The launcher starts it on every host as `python -P -m lockstep.launch.node`, directly or through ssh or similar, and
communicates with it over its standard streams (`lockstep.launch.protocol.messages`). If the launcher's heartbeats stop,
because it was killed or the network is down, this process ends the job's processes on its host. If this process is
killed, its workers die with it, and its parent, the guard in `__main__`, ends their descendants. It keeps
running between generations of the workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config.values import NOTICE
from lockstep.errors import WorldError, reached_limit
from lockstep.launch.node.host_workers import HostWorkers
from lockstep.launch.node.job_folders import own_snapshots
from lockstep.launch.node.processes import allow_many_files
from lockstep.launch.node.worker_starter import WorkerStarter
from lockstep.launch.node.worker_watch import StayingWorkers
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol import messages
from lockstep.launch.protocol.reachability import Listeners, reachable
from lockstep.world.devices import usable_cores
from lockstep.world.interfaces import addresses


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, while the preloaded process imports

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"Lockstep": __version__, "torch": torch.partition("+")[0], "Python": "{}.{}".format(*sys.version_info)}


class Node:
    """The state of this host's part.

    Args:
        reader: Stream of the launcher's messages.
        writer: Stream for the answers.
        scratch: A folder for this job, which the guard removes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, scratch: Path) -> None:
        self._reader = reader
        self._writer = writer
        self._scratch = scratch
        self._starter = WorkerStarter()
        self._changed = asyncio.Event()  # a child of this process has exited, or a worker that stays has said something
        self._staying = StayingWorkers(self._changed)
        self._listeners: Listeners | None = None
        self._workers: HostWorkers | None = None
        self._timings = Timings()  # until the launcher sends others
        self._inspections: set[asyncio.Task[None]] = set()  # keeps them from being collected
        self._heartbeat = asyncio.Event()  # set if silence means that the launcher is dead

    async def run(self) -> int:
        """Serve the launcher until it disconnects and all processes of the job on this host have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, *NOTICE):
            loop.add_signal_handler(number, self._signal_workers, number)
        loop.add_signal_handler(signal.SIGCHLD, self._changed.set)
        gone = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, gone.set)
        obeying = asyncio.create_task(self._obey())
        tasks = {obeying, *(asyncio.create_task(each) for each in (gone.wait(), self._beat()))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    await self._fail(error)
            if gone.is_set():
                await self._fail(WorldError("lost its guard process or its session (SIGHUP): one of them was killed"))
            return obeying.result() if obeying.done() and not obeying.exception() else 0
        finally:
            for task in tasks:
                task.cancel()
            try:
                await self._end(self._timings.host_end)
            finally:
                self._starter.close()
                loop.remove_signal_handler(signal.SIGHUP)  # the guard may now end this process immediately

    async def _fail(self, error: BaseException) -> None:
        if not isinstance(error, (WorldError, OSError)):
            raise error
        with suppress(TimeoutError):  # if the launcher is unreachable, unsent messages may fill the buffer
            text = f"cannot go on: {reached_limit(error) or error}" if isinstance(error, OSError) else str(error)
            await asyncio.wait_for(self._send(messages.NodeFailure(text)), self._timings.error_send)

    async def _obey(self) -> int:
        """Execute the launcher's messages until it disconnects; return the exit code."""
        message = await self._message(None)
        if message is None:
            return messages.NO_MESSAGE
        if isinstance(message, messages.Foreign):
            await self._send(messages.NodeFailure(f"has Lockstep {__version__}, unlike the launcher"))
            return 1
        while message:
            match message:
                case messages.NodeJob():
                    await self._begin(message)
                case messages.Reach(listeners):
                    assert self._workers
                    await self._send(
                        messages.Reached(await reachable(listeners, self._workers.job.secret, self._timings.connect))
                    )
                case messages.Start():
                    assert self._workers
                    self._workers.start(message, self._listeners)
                case messages.HostsChanged(change):
                    self._staying.tell({"change": change})
                case messages.Leave():
                    assert self._workers
                    await self._workers.leave()
                case messages.Signal(number):
                    self._signal_workers(number)
                case messages.Inspect():
                    assert self._workers
                    inspecting = asyncio.create_task(self._workers.inspect())
                    self._inspections.add(inspecting)
                    inspecting.add_done_callback(self._inspections.discard)
                case messages.End(seconds):
                    await self._end(seconds)
            message = await self._message(self._timings.silence if self._heartbeat.is_set() else None)
        return 0

    async def _begin(self, job: messages.NodeJob) -> None:
        """Accept a job: its first generation, or the next one."""
        self._listeners, self._timings = None, job.timings
        if job.heartbeat:
            self._heartbeat.set()
        if job.snapshots:
            own_snapshots(self._scratch, Path(job.snapshots), discard=job.newcomer)
        try:
            os.chdir(job.folder)
        except OSError as error:
            raise WorldError(
                f"cannot open the folder {job.folder} ({error.strerror}); start the job in a folder shared by all hosts"
            ) from None
        kept = self._workers.waiting if self._workers else ()
        if job.is_elastic:
            await self._staying.open()
        self._workers = HostWorkers(job, self._scratch, self._starter, self._staying, kept, self._changed, self._send)
        ready = messages.NodeReady(versions(), cores=usable_cores())
        if len(job.slots) > 1 and not job.loopback:
            own = [("", job.address)] if job.address else addresses(job.interfaces)
            if not own:
                raise WorldError(f"has no network address on {', '.join(job.interfaces) or 'any interface'}")
            if job.node == 0:
                self._listeners = Listeners(job.secret, own, job.timings.connect)
                await self._listeners.answer()
                ready = replace(ready, listeners=self._listeners.open)
        await self._send(ready)

    def _signal_workers(self, number: int) -> None:
        if self._workers:
            self._workers.signal(signal.Signals(number))

    async def _end(self, seconds: float) -> None:
        if self._workers:
            await self._workers.end(seconds)

    async def _beat(self) -> None:
        await self._heartbeat.wait()
        while True:
            await self._send(messages.Alive())
            await asyncio.sleep(self._timings.heartbeat)

    async def _message(self, seconds: float | None) -> messages.Message | None:
        """Return the launcher's next message; None if it has disconnected.

        Raises:
            WorldError: Nothing arrived for `seconds`; the launcher receives this error if it comes back.
            Exception: The error that ended the work.
        """
        message = asyncio.ensure_future(messages.receive(self._reader))
        work = self._workers.work if self._workers else None
        try:
            while not message.done():
                if work and work.done() and not work.cancelled() and (error := work.exception()):
                    raise error
                waits: set[asyncio.Future[Any]] = {message, *([work] if work and not work.done() else [])}
                done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    raise WorldError(f"received nothing from the launcher for {seconds:g} s, and ended its workers")
            return message.result()
        finally:
            message.cancel()

    async def _send(self, message: messages.Message) -> None:
        with suppress(ConnectionError):  # a dead launcher is detected by its silence
            self._writer.write(messages.pack(message))
            await self._writer.drain()


async def serve(scratch: Path) -> int:
    """Run a node process over the standard streams."""
    allow_many_files()
    reader, writer = await messages.reader_of(os.dup(0)), await messages.writer_to(os.dup(1))
    os.dup2(2, 1)  # a stray print must not look like a message
    return await Node(reader, writer, scratch).run()
