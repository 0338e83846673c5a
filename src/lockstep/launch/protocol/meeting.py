"""The connection between the nodes of a manually started job, which have no common launcher.

The other nodes connect to the first one. All agree on the job's terms, end the job together when a node fails or
disconnects, and wait for each other at the end. `lockstep.launch.protocol.handshake` rejects other processes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

from lockstep.files.untrusted import printable
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.handshake import MeetingError, Newcomer, StrangerError, admit, introduce
from lockstep.launch.protocol.messages import (
    Alive,
    FailedElsewhere,
    Finished,
    Message,
    MessageError,
    Refused,
    Terms,
    WorkerFailure,
    pack,
    receive,
)


@dataclass
class _Peer:
    """Another node, and the connection to it."""

    node: int
    host: str
    workers: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: float = field(default_factory=monotonic)

    def send(self, message: Message) -> None:
        if not self.writer.is_closing():
            self.writer.write(pack(message))


class Meeting:
    """This node's connections: at the first node to all others, at the others to the first.

    Create one with `lead` or `join`, under `asyncio.timeout`, and `close` it, which delivers the last messages.
    """

    terms: Terms

    def __init__(self, node: int, nodes: int, timings: Timings) -> None:
        self._node = node
        self._nodes = nodes
        self._timings = timings
        self._peers: dict[int, _Peer] = {}
        self._listening: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._agreed: asyncio.Future[Terms] = loop.create_future()
        self._verdict: asyncio.Future[FailedElsewhere] = loop.create_future()
        self._finished: set[int] = set()
        self._released: asyncio.Future[None] = loop.create_future()
        self._closing = False
        self._beating = asyncio.create_task(self._beat())

    @classmethod
    async def lead(
        cls,
        listener: socket.socket,
        nodes: int,
        workers: int,
        secret: str,
        run_id: str,
        timings: Timings,
        turned_away: list[str],
    ) -> Meeting:
        """Wait at the first node until all others have joined.

        Args:
            listener: Stays open, but accepts no connection after the last node's.
            turned_away: Receives a line about each node without a valid proof, for the timeout's message.
        """
        meeting = cls(0, nodes, timings)
        try:
            async with _accepting(listener, lambda connection: meeting._admit(connection, secret, turned_away)):
                while len(meeting._peers) < nodes - 1:
                    meeting._arrived.clear()
                    await meeting._arrived.wait()
                slots = (workers, *(meeting._peers[node].workers for node in range(1, nodes)))
                terms = Terms(slots, run_id)
                meeting._agree(terms)
                meeting._send(terms)
        except BaseException:
            await meeting.close()
            raise
        return meeting

    @classmethod
    async def join(
        cls,
        address: str,
        port: int,
        node: int,
        nodes: int,
        workers: int,
        secret: str,
        timings: Timings,
        own: str = "",
    ) -> Meeting:
        """Connect to the first node, which may start later, and wait until all others have joined.

        Args:
            address: The first node's address, not a host name.
            own: This host's address to connect from; "" lets the system choose.

        Raises:
            MeetingError: The first node refuses this one, does not have the secret, or `own` is not an address here.
        """
        if not 0 < node < nodes:
            raise MeetingError(f"node {node} of {nodes} cannot join the first node; use a number from 1 to {nodes - 1}")
        newcomer = Newcomer(node, nodes, workers, socket.gethostname())
        while True:
            with suppress(OSError, StrangerError):  # TimeoutError is an OSError
                async with asyncio.timeout(timings.connect):
                    streams = await introduce(await _connect(address, port, own), newcomer, secret)
                meeting = cls(node, nodes, timings)
                meeting._add(_Peer(0, "the first node", 0, *streams))
                if await meeting._is_agreed():
                    return meeting
            await asyncio.sleep(timings.reconnect)

    async def verdict(self) -> FailedElsewhere:
        """Wait until another node fails or disconnects."""
        return await asyncio.shield(self._verdict)

    async def report(self, failures: Sequence[WorkerFailure]) -> None:
        """Pass this node's failures to all others."""
        self._send(FailedElsewhere(socket.gethostname(), tuple(failures)))

    async def finish(self) -> None:
        """Wait until the workers of the other nodes have finished too, or there is a verdict."""
        if self._node == 0:
            self._finish(0)
        else:
            self._send(Finished())
        await asyncio.wait((self._released, self._verdict), return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Deliver what was sent and disconnect."""
        if not self._closing:
            self._closing = True
            if not self._released.done():
                self._released.set_result(None)  # ends `finish`
            self._beating.cancel()
            for peer in self._peers.values():
                with suppress(OSError):
                    peer.writer.write_eof()  # closing with unread heartbeats would discard messages in flight
        try:
            if self._listening:
                await asyncio.wait(self._listening, timeout=self._timings.close)
        finally:
            for peer in [*self._peers.values()]:
                self._drop(peer)
            for task in self._listening:
                task.cancel()
        await asyncio.gather(self._beating, *self._listening, return_exceptions=True)

    async def _admit(self, connection: socket.socket, secret: str, turned_away: list[str]) -> None:
        """Identify and register a node; drop other peers, and refuse a node that does not match the job."""
        try:
            async with asyncio.timeout(self._timings.connect):
                newcomer, streams = await admit(connection, secret)
        except OSError:
            return
        except StrangerError as stranger:
            if (complaint := str(stranger)) and complaint not in turned_away:
                turned_away.append(complaint)
            return
        if why := self._refusal(newcomer):
            _, writer = streams
            writer.write(pack(Refused(why)))
            writer.close()
            return
        self._add(_Peer(newcomer.node, newcomer.host, newcomer.workers, *streams))
        self._arrived.set()

    def _refusal(self, newcomer: Newcomer) -> str:
        """Return why a node cannot join, or ""."""
        node, nodes = newcomer.node, newcomer.nodes
        if nodes != self._nodes:
            return f"this is one of {nodes} nodes, but the first node has --nodes {self._nodes}; use the same on both"
        if not 0 < node < nodes:
            return f"node {node} of {nodes} cannot join the first node; use a number from 1 to {nodes - 1}"
        if newcomer.workers < 1:
            return f"node {node} has {newcomer.workers} workers; it needs at least 1"
        if node in self._peers:
            return f"node {node} has already joined, from {self._peers[node].host}; use a unique --node-rank per node"
        return ""

    async def _is_agreed(self) -> bool:
        """Wait for the terms; return False if the first node disconnects first."""
        is_agreed = False
        try:
            await asyncio.wait((self._agreed, self._verdict), return_when=asyncio.FIRST_COMPLETED)
            is_agreed = self._agreed.done() and bool(self._agreed.result())
        finally:
            if not is_agreed:
                await self.close()
        return is_agreed

    def _add(self, peer: _Peer) -> None:
        self._peers[peer.node] = peer
        task = asyncio.create_task(self._listen(peer))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    def _agree(self, terms: Terms) -> None:
        if not self._agreed.done():
            self.terms = terms
            self._agreed.set_result(terms)

    def _send(self, message: Message, but: _Peer | None = None) -> None:
        for peer in self._peers.values():
            if peer is not but and not self._closing:
                peer.send(message)

    async def _listen(self, peer: _Peer) -> None:
        try:
            while message := await _next(peer.reader):
                peer.heard = monotonic()
                self._take(peer, message)
        except (OSError, ValueError):
            pass  # connection reset, or a line over the limit
        finally:
            self._lose(peer)

    def _take(self, peer: _Peer, message: Message) -> None:
        match message:
            case FailedElsewhere(host, failures):
                shown = tuple(replace(failure, text=printable(failure.text)) for failure in failures)
                self._judge(FailedElsewhere(printable(host), shown), source=peer)
            case Finished():
                self._finish(peer.node)
            case Terms(slots, run_id) if peer.node == 0:
                self._agree(Terms(slots, printable(run_id)))
            case Refused(why) if peer.node == 0 and not self._agreed.done():
                self._agreed.set_exception(MeetingError(printable(why)))

    def _judge(self, verdict: FailedElsewhere, source: _Peer) -> None:
        """Keep the first verdict; the first node forwards it."""
        if not self._verdict.done():
            self._verdict.set_result(verdict)
            self._send(verdict, but=source)

    def _finish(self, node: int) -> None:
        """Record that a node's workers have finished; from the first node: the workers of all nodes."""
        self._finished.add(node)
        done = len(self._finished) == self._nodes if self._node == 0 else node == 0
        if done and not self._released.done():
            self._released.set_result(None)
            if self._node == 0:
                self._send(Finished())

    def _lose(self, peer: _Peer) -> None:
        """Close a connection, which is a verdict if the job still needs that node."""
        if self._peers.get(peer.node) is not peer:
            return
        del self._peers[peer.node]
        peer.writer.close()
        is_waiting = self._node == 0 and not self._agreed.done()  # the node may reconnect
        if not (self._closing or is_waiting or peer.node in self._finished):
            self._judge(FailedElsewhere(peer.host, ()), source=peer)

    def _drop(self, peer: _Peer) -> None:
        """Disconnect from a peer without sending what is still buffered."""
        peer.writer.transport.abort()
        self._lose(peer)

    async def _beat(self) -> None:
        while True:
            before = monotonic()
            await asyncio.sleep(self._timings.heartbeat)
            now = monotonic()
            for peer in [*self._peers.values()]:
                if now - before > self._timings.standstill:
                    peer.heard = now
                peer.send(Alive())
                if now - peer.heard > self._timings.silence:
                    self._drop(peer)


async def _next(reader: asyncio.StreamReader) -> Message | None:
    """Return the next valid message."""
    while True:
        with suppress(MessageError):
            return await receive(reader)


async def _connect(address: str, port: int, own: str) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if own:
            try:
                connection.bind((own, 0))
            except OSError as error:
                raise MeetingError(f"cannot connect from {own}: {error.strerror}") from None
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return connection


@asynccontextmanager
async def _accepting(
    listener: socket.socket, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Serve each connection of a listener in its own task; at the end, drop connections still being served."""
    tasks: set[asyncio.Task[None]] = set()

    def accept() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer disconnected, or too many files are open for now
            return
        connection.setblocking(False)
        task = asyncio.create_task(serve(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: connection.close() if done.cancelled() else None)  # perhaps before it ran

    loop, timeout = asyncio.get_running_loop(), listener.gettimeout()
    listener.setblocking(False)
    loop.add_reader(listener, accept)  # not asyncio.start_server, which takes the whole backlog at once
    try:
        yield
    finally:
        loop.remove_reader(listener)
        listener.settimeout(timeout)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
