"""The first of several manually started nodes: it admits the others, and starts processes on them.

Each of the others (`lockstep.launch.controller.relay`) has one connection as long as it takes part, for what concerns
the node, and one more for each node process, which carries that process's lines. `handshake` precedes both.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from lockstep.config.values import NOTICE
from lockstep.errors import plural
from lockstep.files.output import say
from lockstep.launch.controller.host_process import RelayedProcess
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.hosts import HOST_NAME, is_here
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol import messages
from lockstep.launch.protocol.handshake import SealedLines, Seals, StrangerError, admit
from lockstep.world.peer_loss import detect_loss

STOP = (signal.SIGINT, signal.SIGTERM)  # what other nodes may ask for, with notices of a batch system
CONTROL_BYTES = 1 << 10  # limit for a message about a node, once it has joined
REPORT_CHARACTERS = 10_000
Connected = tuple[socket.socket, Seals]


class JoinedNode:
    """A node that takes part: its connection, for what concerns the node, and what it is asked for."""

    def __init__(self, newcomer: messages.Introduction, connection: socket.socket, seals: Seals) -> None:
        self.newcomer = newcomer
        self.connection = connection
        self.is_lost = False
        self.awaited: dict[str, asyncio.Future[Connected]] = {}  # the connections of processes, by ticket
        self._seals = seals
        self._received = b""  # the start of a message, which another event loop may complete
        self._signs: list[asyncio.Future[bool]] = []  # awaited signs of life

    def send(self, message: messages.Message) -> None:
        """Send a message, which is short enough for the socket's buffer; a node whose buffer is full is lost."""
        line = self._seals.outgoing.add(messages.pack(message))
        with suppress(OSError):
            if self.connection.send(line) == len(line):
                return
        self.lose()

    async def listen(self, take_signal: Callable[[int], None]) -> None:
        """Receive its messages until it disconnects."""
        receive = asyncio.get_running_loop().sock_recv
        with suppress(OSError, messages.MessageError):
            while (part := await receive(self.connection, CONTROL_BYTES)) and len(self._received) < CONTROL_BYTES:
                *lines, self._received = (self._received + part).split(b"\n")
                for line in lines:
                    match messages.unpack(self._seals.incoming.remove(line + b"\n")):
                        case messages.Alive():
                            self._resolve(True)
                        case messages.Signal(number):
                            take_signal(number)
        self.lose()
        self.connection.close()

    async def answers(self, seconds: float) -> bool:
        """Whether it answers in time; it is lost otherwise."""
        self._signs = [each for each in self._signs if not each.done()]
        self._signs.append(sign := asyncio.get_running_loop().create_future())
        self.send(messages.Alive())
        with suppress(TimeoutError):
            return await asyncio.wait_for(sign, seconds)
        self.lose()
        return False

    def lose(self) -> None:
        self.is_lost = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # ends `listen`
        self._resolve(False)
        for connected in self.awaited.values():
            if not connected.done():
                connected.set_exception(ConnectionError())

    def _resolve(self, is_alive: bool) -> None:
        for sign in self._signs:
            if not sign.done():
                sign.set_result(is_alive)


class ManualNodes:
    """The other nodes of a job.

    It serves the event loop that runs: first while the nodes join, and then while the job runs.

    Args:
        listener: Where they connect.
        nodes: The number of all nodes.
        secret: As in `admit`.
        here: The names of this machine.
        obey: They run this node's command.
    """

    def __init__(
        self,
        listener: socket.socket,
        nodes: int,
        secret: str,
        here: frozenset[str],
        timings: Timings,
        obey: bool = False,
    ) -> None:
        self.obey = obey
        self._listener = listener
        self._nodes = nodes
        self.secret = secret
        self._here = here
        self._timings = timings
        self._joined: dict[int, JoinedNode] = {}  # also those that are lost
        self._names: dict[str, int] = {}
        self._workers: dict[int, int] = {}  # once all have joined
        self._turned_away: list[str] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_joined = asyncio.Event()

    async def wait(self, seconds: float, where: str) -> list[tuple[str, int]]:
        """Wait until all nodes have joined; return the name and the workers of each.

        Args:
            where: The address, for messages.

        Raises:
            StartError: Some have not joined in time; the message names them.
        """
        self._serve()
        explaining = asyncio.create_task(self._explain(time.time() + seconds))
        try:
            async with asyncio.timeout(seconds):
                while self._missing() or not await self._all_answer():
                    if self._missing():
                        self._has_joined.clear()
                        await self._has_joined.wait()
        except TimeoutError:
            turned_away = "".join(f"; {complaint}" for complaint in self._turned_away)
            raise StartError(
                f"waited {seconds:g} s at {where} for {_named(self._missing())} of {self._nodes}; start `lockstep` "
                f"there with the same --master-addr and --master-port{turned_away}"
            ) from None
        finally:
            explaining.cancel()
        for node, joined in sorted(self._joined.items()):
            self._workers[node] = joined.newcomer.workers
            self._names[self._name_of(joined.newcomer)] = node
        return [(name, self._workers[node]) for name, node in self._names.items()]

    async def start(self, host: str, stager: bool = False) -> RelayedProcess:
        """Start a process on a host: as in `Launch`.

        Raises:
            StartError: It takes no part any more.
        """
        self._serve()
        joined = self._joined[self._names[host]]
        ticket, connected = secrets.token_hex(16), asyncio.get_running_loop().create_future()
        joined.awaited[ticket] = connected
        try:
            joined.send(messages.Launch(ticket, stager))
            connection, seals = await connected
            streams = await asyncio.open_connection(sock=connection, limit=messages.LIMIT_BYTES)
            return RelayedProcess(SealedLines(*streams, seals))
        except ConnectionError:
            node = self._names[host]
            raise StartError(f"{host} takes no part any more; start node {node} there again", (host,)) from None
        finally:
            del joined.awaited[ticket]

    async def is_present(self, host: str, seconds: float) -> bool:
        """Whether a host takes part and answers in time."""
        self._serve()
        return await self._joined[self._names[host]].answers(seconds)

    def report(self, text: str) -> None:
        """Print a text on the terminals of all nodes."""
        for joined in self._joined.values():
            joined.send(messages.Announcement(text[:REPORT_CHARACTERS]))

    def close(self, code: int) -> None:
        """Let all nodes end with this exit code."""
        self._listener.close()
        for joined in self._joined.values():
            joined.send(messages.JobOver(code))
        for joined in self._joined.values():
            with suppress(OSError):
                joined.connection.shutdown(socket.SHUT_WR)
                joined.connection.settimeout(self._timings.close)
                while joined.connection.recv(CONTROL_BYTES):  # closing with unread messages would discard the last one
                    pass
            joined.connection.close()

    def _serve(self) -> None:
        """Accept connections, and listen to the nodes, in the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop = loop
        self._listener.setblocking(False)
        loop.add_reader(self._listener, self._accept)  # not asyncio.start_server, which takes the whole backlog at once
        for joined in self._joined.values():
            self._do(joined.listen(self._take_signal))

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer disconnected, or too many files are open for now
            return
        connection.setblocking(False)
        detect_loss(connection, self._timings.silence)
        task = self._do(self._admit(connection))
        task.add_done_callback(lambda done: connection.close() if done.cancelled() else None)  # perhaps before it ran

    async def _admit(self, connection: socket.socket) -> None:
        """Identify a node, and register it or its process; drop other peers, and refuse a node that does not match."""
        try:
            async with asyncio.timeout(self._timings.connect):
                newcomer, seals = await admit(connection, self.secret)
        except OSError:
            return
        except StrangerError as stranger:
            if (complaint := str(stranger)) and complaint not in self._turned_away:
                self._turned_away.append(complaint)
                say(f"lockstep: refused: {complaint}")
            return
        if newcomer.ticket:
            awaited = {ticket: each for joined in self._joined.values() for ticket, each in joined.awaited.items()}
            connected = awaited.get(newcomer.ticket)
            if connected and not connected.done():
                connected.set_result((connection, seals))
            else:
                connection.close()
            return
        joined = JoinedNode(newcomer, connection, seals)
        if why := await self._refusal(newcomer):
            joined.send(messages.Refused(why))
            connection.close()
            return
        self._joined[newcomer.node] = joined
        joined.send(messages.Alive())
        self._has_joined.set()
        self._do(joined.listen(self._take_signal))

    async def _refusal(self, newcomer: messages.Introduction) -> str:
        """Return why a node cannot join, or ""."""
        node, nodes = newcomer.node, newcomer.nodes
        if nodes != self._nodes:
            return f"this is one of {nodes} nodes, but the first node has --nodes {self._nodes}; use the same on both"
        if not 0 < node < nodes:
            return f"node {node} of {nodes} cannot join the first node; use a number from 1 to {nodes - 1}"
        if newcomer.obeys != self.obey:
            own, led = (f"node {node}", "the first node") if self.obey else ("the first node", f"node {node}")
            return f"{own} runs a command of its own, unlike {led}: give both --stage, or start a study on both"
        if newcomer.workers < 1:
            return f"node {node} has {newcomer.workers} workers; it needs at least 1"
        if newcomer.workers != self._workers.get(node, newcomer.workers):
            return f"node {node} had {plural(self._workers[node], 'worker')} in this job; use -np {self._workers[node]}"
        while node not in self._missing():
            other = self._joined[node]
            if await other.answers(self._timings.connect):
                return f"node {node} has already joined, from {other.newcomer.host}; use a unique --node-rank per node"
        return ""

    def _take_signal(self, number: int) -> None:
        if number in (*STOP, *NOTICE) and self._workers:
            os.kill(os.getpid(), number)  # as if this launcher had received it

    async def _all_answer(self) -> bool:
        return all(await asyncio.gather(*(each.answers(self._timings.connect) for each in self._joined.values())))

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._nodes) if node not in self._joined or self._joined[node].is_lost]

    async def _explain(self, deadline: float) -> None:
        """After some seconds, print which nodes are missing, and until when they are waited for."""
        await asyncio.sleep(self._timings.connect)
        if missing := self._missing():
            until = time.strftime("%H:%M:%S", time.localtime(deadline))
            text = f"lockstep: waiting for {_named(missing)} of {self._nodes} until {until} (--start-timeout)"
            say(text)
            self.report(text)

    def _name_of(self, newcomer: messages.Introduction) -> str:
        """Return a name for the messages that no other host of this job has."""
        name = newcomer.host
        is_name = HOST_NAME.fullmatch(name) and ":" not in name
        if not is_name or name in self._names or is_here(name, self._here):
            return f"node{newcomer.node}.{name}" if is_name else f"node{newcomer.node}"
        return name


def _named(nodes: Sequence[int]) -> str:
    return f"{'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, nodes))}"
