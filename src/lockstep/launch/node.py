"""One host's guard of a job: starts the agent there, carries the workers' output, and leaves nothing behind.

The launcher starts it on every host as `python -P -m lockstep.launch.node`, directly or through ssh and its like, and
speaks with it over its standard streams (`lockstep.launch.wire`). When the launcher falls silent, be it killed or cut
off, the job's processes on this host end. When the agent is killed, its workers die with it, and what they have
started, which becomes this process's children, is killed here. When this process is killed, the agent ends the workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp
from typing import Any

import psutil

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.interfaces import address_towards, addresses, interface_of, is_loopback, only_address, only_interface
from lockstep.launch.family import adopt_orphans, allow_many_files, kill_descendants
from lockstep.launch.leftovers import remove_dead_sockets
from lockstep.launch.plan import LOOPBACK_INTERFACE, handed_on, threads
from lockstep.launch.reach import Doors, listen, proof, reachable
from lockstep.launch.snapshot_memory import SnapshotMemory
from lockstep.launch.wire import (
    HEARTBEAT_SECONDS,
    LIMIT_BYTES,
    NOBODY_SPOKE,
    PROTOCOL,
    SILENCE_SECONDS,
    pack,
    receive,
    text_of,
)
from lockstep.world import usable_cores

CHUNK_BYTES = 1 << 16
TELL_SECONDS = 1.0
END_SECONDS = 5.0  # more than the agent needs to end its workers
KEEP_SECONDS = 20.0  # in which the launcher, when all hosts have ended, says whether the job goes on
STREAMS = ("stdout", "stderr")
# To the agent.
HANDED_ON = (
    *("node", "nodes", "workers", "slots", "command", "bind", "patience"),
    *("snapshots", "restart", "max_restarts"),
)


class NodeError(LockstepError):
    """This host cannot take its part in the job."""


@dataclass(frozen=True)
class NodeJob:
    """What a node process has to know of the job; the fields' JSON is the launcher's first message.

    Args:
        node: This host's number among `nodes`.
        slots: Workers on each node; empty where the nodes are started by hand.
        host: This host's name in the plan.
        environment: On top of this process's own.
        folder: Where the workers start.
        secret: Known to the job alone; empty where nodes are started by hand and were given none.
        heartbeat: Whether silence means that the launcher is lost; a pipe on one machine tells without.
        stdout: A descriptor that workers write to directly, or -1.
        interfaces: The only ones to use, if any.
        by_hand: Address and port of the meeting point, where the nodes are started by hand.
        snapshots: The folder in memory that outlives the workers, "" where there is none.
        newcomer: This host was not there at the start before, and what it holds in memory is of no use.
    """

    node: int
    nodes: int
    workers: int
    slots: list[int]
    host: str
    command: list[str]
    environment: dict[str, str]
    folder: str
    bind: str
    secret: str = field(repr=False)
    heartbeat: bool
    stdout: int
    interfaces: list[str]
    by_hand: list[Any] | None
    patience: float
    loopback: bool
    snapshots: str
    newcomer: bool
    restart: int
    max_restarts: int
    protocol: int = PROTOCOL


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"Lockstep": __version__, "torch": torch.partition("+")[0], "Python": "{}.{}".format(*sys.version_info)}


class Node:
    """The state of this host's part.

    Args:
        reader: The launcher's messages.
        writer: Takes the answers.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._agent: asyncio.subprocess.Process | None = None
        self._doors: Doors | None = None
        self._pids: list[int] = []
        self._watched: asyncio.Task[None] | None = None
        self._scratch = ""
        self._memory: SnapshotMemory | None = None
        self._keeps = False
        self._since = time.time()

    async def run(self) -> int:
        """Serve the launcher until the job here has ended, and every process of it."""
        first = await self._message(None)
        if first is None:
            return NOBODY_SPOKE
        if "forget" in first:
            SnapshotMemory.remove_abandoned(Path(first["forget"]))
            return 0
        if first.get("protocol") != PROTOCOL:
            await self._send({"is": "error", "text": f"has Lockstep {__version__}, which is not the launcher's"})
            return 1
        self._job = NodeJob(**first)
        if self._job.snapshots:
            self._memory = SnapshotMemory(Path(self._job.snapshots), self._job.newcomer)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            loop.add_signal_handler(number, self._signal_workers, number)
        gone = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, gone.set)
        tasks = {asyncio.ensure_future(each) for each in (self._obey(), gone.wait())}
        if self._job.heartbeat:
            tasks.add(asyncio.ensure_future(self._beat()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled() and (error := task.exception()):
                    await self._fail(error)
        finally:
            for task in tasks:
                task.cancel()
            await self._end(END_SECONDS)
            await self._leave_memory()
        return 0

    async def _fail(self, error: BaseException) -> None:
        if not isinstance(error, (NodeError, OSError)):
            raise error
        with suppress(TimeoutError):  # where the launcher cannot be reached, what waits for it may leave no room
            await asyncio.wait_for(self._send({"is": "error", "text": str(error)}), TELL_SECONDS)

    async def _obey(self) -> None:
        """Do what the launcher says, until it is gone or the agent has ended and all is told."""
        self._check()
        hello: dict[str, Any] = {"is": "here", "versions": versions(), "name": socket.gethostname()}
        if self._job.nodes > 1 and not self._job.by_hand and not self._job.loopback:
            own = addresses(self._job.interfaces)
            if not own:
                raise NodeError(f"has no network address on {', '.join(self._job.interfaces) or 'any interface'}")
            if self._job.node == 0:
                self._doors = Doors(self._job.secret, own)
                await self._doors.answer()
                hello["doors"] = self._doors.open
        await self._send(hello)
        while message := await self._message(SILENCE_SECONDS if self._job.heartbeat else None):
            match message:
                case {"do": "reach", "doors": doors}:
                    await self._send({"is": "reached", "ways": await reachable(doors, self._job.secret)})
                case {"do": "start", "address": address, "port": port, "own": own}:
                    await self._start(address, port, own)
                case {"do": "signal", "number": number}:
                    self._signal_workers(number)
                case {"do": "end", "seconds": seconds}:
                    await self._end(seconds)
                case {"do": "keep"}:
                    self._keeps = True
        if self._watched and self._watched.done():
            await self._watched  # for its mistakes; else the launcher is gone, and what is left here ends

    def _check(self) -> None:
        try:
            os.chdir(self._job.folder)
        except OSError as error:
            raise NodeError(
                f"has no folder {self._job.folder} ({error.strerror}); start the job in a folder that all hosts share"
            ) from None

    async def _start(self, address: str, port: int, own: str) -> None:
        """Start the agent, which meets the others at `address`; `own` is this host's address on the way there."""
        job = self._job
        listener: socket.socket | None = None
        door = address
        if job.by_hand:
            door, address, port, own = self._meeting_point(*job.by_hand)
        if job.node == 0:
            listener = self._doors.take(address) if self._doors else _listen(door, port)
            listener.setblocking(True)
            port = listener.getsockname()[1]
        interface = LOOPBACK_INTERFACE if address.startswith("127.") else interface_of(own)
        environment = {**handed_on(os.environ), **job.environment, **self._variables(interface)}
        streams, readers, writers = self._pipes()
        report, reporting = os.pipe()
        kept = [*writers, reporting, *([listener.fileno()] if listener else [])]
        self._agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "lockstep.launch.agent", str(reporting)),
            stdin=subprocess.PIPE,
            stdout=job.stdout if job.stdout >= 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=kept,
        )
        for end in kept[: len(writers) + 1]:
            os.close(end)
        self._scratch = mkdtemp(prefix="lockstep-")
        order = {
            **{name: getattr(job, name) for name in HANDED_ON},
            "streams": streams,
            "run_id": proof(job.secret or token_hex(), "run").hex()[:16],  # workers get it: not the secret itself
            "secret": job.secret,
            "address": address,
            "port": port,
            "parent": os.getpid(),
            "listener": listener.fileno() if listener else -1,
            "scratch": self._scratch,
        }
        assert self._agent.stdin
        self._agent.stdin.write(json.dumps(order).encode())
        self._agent.stdin.close()
        if listener:
            listener.close()
        self._watched = asyncio.create_task(self._watch(report, readers))

    def _meeting_point(self, name: str, port: int) -> tuple[str, str, int, str]:
        """Where to listen, where the point is, and this host's own address, for nodes that are started by hand."""
        address = _resolved(name)
        pairs = addresses(self._job.interfaces)
        own = [each for _, each in pairs]
        if self._job.node == 0 and address.startswith("127.") and not is_loopback(name):
            # Debian calls a host 127.0.1.1 in its own /etc/hosts; the others know it by another address
            if not own:
                raise NodeError(f"calls itself {address}, and has no other address; give --master-addr an address")
            return own[0] if self._job.interfaces else only_address(pairs), own[0], port, own[0]
        if address.startswith("127."):
            return address, address, port, address
        return address, address, port, own[0] if self._job.interfaces and own else address_towards(address)

    def _variables(self, interface: str) -> dict[str, str]:
        """What is this host's own among the workers' variables."""
        given = {**os.environ, **self._job.environment}
        variables = {"HOROVOD_HOSTNAME": self._job.host}
        if "OMP_NUM_THREADS" not in given:
            variables["OMP_NUM_THREADS"] = str(threads(usable_cores(), self._job.workers))
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
            found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": self._for_nccl(interface)}
            variables |= {name: value for name, value in found.items() if value and name not in given}
        return variables

    def _for_nccl(self, interface: str) -> str:
        """What NCCL may use, where that is known: of several interfaces it takes all, which adds up their bandwidth."""
        if interface == LOOPBACK_INTERFACE:
            return f"={interface}"  # without "=", eth1 means eth10, too
        if self._job.interfaces:
            return f"={','.join(self._job.interfaces)}"
        return f"={interface}" if only_interface(addresses()) == interface else ""

    def _pipes(self) -> tuple[list[list[int]], list[tuple[int, str, int]], list[int]]:
        """For each local rank the descriptors that its streams are written to, and those that are read here."""
        streams, readers, writers = [], [], []
        for local_rank in range(self._job.workers):
            ends = []
            for name in STREAMS:
                if name == "stdout" and self._job.stdout >= 0:
                    ends.append(-1)
                    continue
                reader, writer = os.pipe()
                readers.append((local_rank, name, reader))
                writers.append(writer)
                ends.append(writer)
            streams.append(ends)
        return streams, readers, writers

    async def _watch(self, report: int, readers: list[tuple[int, str, int]]) -> None:
        """Follow the agent and its workers' output to their ends, and tell the launcher."""
        assert self._agent
        assert self._agent.stderr
        carriers: list[asyncio.Task[None]] = []
        complaint = asyncio.create_task(self._agent.stderr.read())
        outcome: dict[str, Any] = {}
        messages = await _reader_of(report)
        while message := await receive(messages):
            if message["is"] == "started":
                self._pids = list(message["pids"].values())
                await self._send(message)
                carriers = [asyncio.create_task(self._carry(*each)) for each in readers]  # the ranks are known now
            elif message["is"] == "failing":  # its outcome follows when the agent has ended all workers here
                await self._send(message)
            else:
                outcome = message
        code = await self._agent.wait()
        left = await asyncio.to_thread(kill_descendants)
        if not carriers:
            carriers = [asyncio.create_task(self._carry(*each)) for each in readers]
        if carriers:
            await asyncio.wait(carriers, timeout=END_SECONDS if left else None)
        outcome = {**outcome, "is": "ended", "agent_code": code, "left": left}
        if not outcome.get("failures") and "ended" not in outcome:
            outcome["complaint"] = text_of((await complaint)[-2000:])
        await self._send(outcome)

    async def _carry(self, local_rank: int, name: str, descriptor: int) -> None:
        reader = await _reader_of(descriptor)
        while chunk := await reader.read(CHUNK_BYTES):
            await self._send({"is": "output", "worker": local_rank, "name": name, "text": text_of(chunk)})
        await self._send({"is": "output", "worker": local_rank, "name": name, "text": ""})

    def _signal_workers(self, number: int) -> None:
        """To the workers alone: the processes they have started are theirs to end."""
        if not self._agent or self._agent.returncode is not None:
            return
        if number == signal.SIGTERM:  # the agent then leaves it to the workers when they end
            self._agent.send_signal(number)
        for pid in self._pids:
            with suppress(psutil.Error, OSError):
                if psutil.Process(pid).ppid() == self._agent.pid:  # else it has ended, and the number is another's now
                    os.kill(pid, number)

    async def _end(self, seconds: float) -> None:
        """End the agent, which ends the workers, and then whatever is left; by force after `seconds`."""
        if self._agent and self._agent.returncode is None:
            with suppress(ProcessLookupError):
                if seconds and self._pids:
                    self._agent.send_signal(signal.SIGQUIT)
                else:
                    self._agent.kill()
            try:
                await asyncio.wait_for(self._agent.wait(), seconds or 1.0)
            except TimeoutError:
                self._agent.kill()
                await self._agent.wait()
        await asyncio.to_thread(kill_descendants)
        if self._watched:
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(asyncio.shield(self._watched), 2.0)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)  # which an agent that was killed has left
            await asyncio.to_thread(remove_dead_sockets, self._since)

    async def _leave_memory(self) -> None:
        """Remove the snapshots here, unless the launcher says that the job is to go on with them."""
        if not self._memory:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(KEEP_SECONDS):
                while not self._keeps and (message := await receive(self._reader)):
                    self._keeps = message.get("do") == "keep"
        if not self._keeps:
            await asyncio.to_thread(self._memory.remove)

    async def _beat(self) -> None:
        while True:
            await self._send({"is": "alive"})
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _message(self, seconds: float | None) -> dict[str, Any] | None:
        """The launcher's next message; None when it is gone, or the job here has ended.

        Raises:
            NodeError: It was silent for so long. It may come back and hear of this.
        """
        waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(receive(self._reader))}
        if self._watched:
            waits.add(self._watched)
        done, _ = await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            if each is not self._watched:
                if each in done:
                    message: dict[str, Any] | None = each.result()
                    return message
                each.cancel()
        if not done:
            raise NodeError(f"has not heard of the launcher for {seconds:g} s, and has ended its workers")
        return None

    async def _send(self, message: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # a launcher that is gone is noticed by its silence
            self._writer.write(pack(message))
            await self._writer.drain()


def _resolved(name: str) -> str:
    """The address of a host's name."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NodeError(f"cannot find {name}: {error.strerror}; check --master-addr") from None
    return str(found[0][4][0])


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        flag = "--master-port" if "in use" in str(error) else "--master-addr"
        raise NodeError(
            f"cannot serve the meeting point at {address}:{port}: {os.strerror(error.errno or 0)}; change {flag}"
        ) from None


async def _reader_of(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LIMIT_BYTES)
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _writer_to(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0)
    )
    transport.set_write_buffer_limits(high=0)  # what has been drained has been written, the last words too
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def main() -> int:
    adopt_orphans()
    allow_many_files()
    reader, writer = await _reader_of(os.dup(0)), await _writer_to(os.dup(1))
    os.dup2(2, 1)  # a stray print must not look like a message
    return await Node(reader, writer).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
