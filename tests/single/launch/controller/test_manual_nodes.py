"""The first of several manually started nodes: which others it admits."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from time_limits import scaled

from lockstep.launch.controller.host_process import RelayedProcess
from lockstep.launch.controller.manual_nodes import ManualNodes
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol.handshake import SealedLines, Seals, introduce
from lockstep.launch.protocol.messages import (
    Alive,
    Announcement,
    Introduction,
    JobOver,
    Launch,
    Message,
    NodeExited,
    Refused,
    pack,
    receive,
)
from lockstep.launch.protocol.reachability import listen

GUARD_SECONDS = 100.0
HERE = frozenset({"here"})


class Dialer:
    """A node whose messages a test controls."""

    connected: list[Dialer] = []  # noqa: RUF012

    def __init__(self, listener: socket.socket) -> None:
        self._address = listener.getsockname()

    async def connect(self, *newcomer: Any, ticket: str = "") -> None:
        connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, self._address)
        await introduce(connection, Introduction(*newcomer, ticket=ticket), "")
        self.reader, self.writer = await asyncio.open_connection(sock=connection)
        self.connected.append(self)

    async def join(self, node: int, nodes: int = 3, workers: int = 1, host: str = "far") -> Message | None:
        """Return the first node's first message."""
        await self.connect(node, nodes, workers, host)
        return await receive(self.reader)

    async def answer(self) -> None:
        """Give a sign of life whenever it is asked for."""
        while isinstance(await receive(self.reader), Alive):
            self.writer.write(pack(Alive()))


def guarded(test: Callable[..., Awaitable[None]]) -> Callable[[], None]:
    """Run a test with the nodes of a job of three and a listener."""

    @functools.wraps(test)
    def run() -> None:
        async def bounded() -> None:
            with listen("127.0.0.1") as listener:
                nodes = ManualNodes(listener, 3, "", HERE, Timings(reconnect=0.1, connect=scaled(0.5)))
                try:
                    await asyncio.wait_for(test(nodes, listener), GUARD_SECONDS)
                finally:
                    while Dialer.connected:
                        Dialer.connected.pop().writer.close()
                    await asyncio.to_thread(nodes.close, 0)

        asyncio.run(bounded())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look for fixtures
    return run


@guarded
async def test_nodes_get_names_that_no_other_host_has(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    dialers = [Dialer(listener), Dialer(listener)]
    assert await dialers[1].join(2, workers=4, host="far; rm -r /") == Alive()
    assert await dialers[0].join(1, host="here") == Alive()
    answering = [asyncio.create_task(each.answer()) for each in dialers]
    for each in dialers:
        each.writer.write(pack(Alive()))
    assert await waiting == [("node1.here", 1), ("node2", 4)]
    for task in answering:
        task.cancel()


@guarded
async def test_node_that_does_not_match_is_refused(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    for node, of, workers, why in (
        (1, 4, 1, "this is one of 4 nodes, but the first node has --nodes 3; use the same on both"),
        (3, 3, 1, "node 3 of 3 cannot join the first node; use a number from 1 to 2"),
        (1, 3, 0, "node 1 has 0 workers; it needs at least 1"),
    ):
        assert await Dialer(listener).join(node, of, workers) == Refused(why)
    nodes.obey = True
    why = "node 1 runs a command of its own, unlike the first node: give both --stage, or start a study on both"
    assert await Dialer(listener).join(1) == Refused(why)
    waiting.cancel()


@guarded
async def test_second_node_with_a_number_waits_for_a_sign_of_the_first(
    nodes: ManualNodes, listener: socket.socket
) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    first, twin, again = Dialer(listener), Dialer(listener), Dialer(listener)
    assert await first.join(1) == Alive()
    answering = asyncio.create_task(first.answer())
    refused = Refused("node 1 has already joined, from far; use a unique --node-rank per node")
    assert await twin.join(1) == refused
    answering.cancel()
    assert await again.join(1) == Alive()  # the former one is silent, as if its host had been cut off
    waiting.cancel()


@guarded
async def test_unknown_ticket_opens_no_connection(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    stranger = Dialer(listener)
    await stranger.connect(1, 3, 1, "far", ticket="00" * 16)
    assert await stranger.reader.read() == b""
    waiting.cancel()


@guarded
async def test_silent_strangers_delay_no_node(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    strangers = [await asyncio.open_connection(*listener.getsockname()) for _ in range(5)]
    assert await Dialer(listener).join(1) == Alive()
    for reader, writer in strangers:
        assert await reader.read() == b""  # each is dropped in the end
        writer.close()
    waiting.cancel()


@guarded
async def test_missing_nodes_are_named(nodes: ManualNodes, listener: socket.socket) -> None:
    with pytest.raises(StartError, match=r"^waited 0\.01 s at here:1 for nodes 1, 2 of 3; start `lockstep` there with"):
        await nodes.wait(0.01, "here:1")


@guarded
async def test_process_is_started_over_a_second_connection(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    dialers, own = [Dialer(listener), Dialer(listener)], Dialer(listener)
    for number, dialer in enumerate(dialers, start=1):
        assert await dialer.join(number) == Alive()
    answering = asyncio.create_task(dialers[0].answer())
    launching = asyncio.create_task(_launch(dialers[1], own))
    (_, (name, _)) = await waiting
    process = await nodes.start(name)
    process.send(b"question\n")
    assert await process.readline() == b"answer\n"
    assert process.exit_code is None
    assert await process.readline() == b""
    assert (await process.wait(), process.exit_code, process.last_lines) == (7, 7, "why")
    await process.close(GUARD_SECONDS)
    assert await launching == b""
    nodes.report("the job hung")
    assert await receive(dialers[1].reader) == Announcement("the job hung")
    dialers[1].writer.close()
    await dialers[1].writer.wait_closed()
    while await nodes.is_present(name, GUARD_SECONDS):
        pass
    with pytest.raises(StartError, match=f"{name} takes no part any more; start node 2 there again"):
        await nodes.start(name)
    answering.cancel()


@guarded
async def test_changed_line_of_a_process_ends_it_with_the_reason(nodes: ManualNodes, listener: socket.socket) -> None:
    connected = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda *streams: connected.set_result(streams), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    theirs = Seals.of("secret", 1, 0, b"")
    writer.write(theirs.outgoing.add(b"hello\n") + theirs.outgoing.add(b"true\n").replace(b"true", b"rm -r"))
    process = RelayedProcess(SealedLines(*await connected, Seals.of("secret", 0, 1, b"")))
    assert await process.readline() == b"hello\n"
    assert await process.readline() == b""
    why = "a line was changed between the nodes, or comes from another program"
    assert (process.exit_code, process.last_lines) == (1, why)
    writer.close()
    server.close()


async def _launch(control: Dialer, own: Dialer) -> bytes:
    """Give signs of life until a process is to be started; be that process, and return what it receives at last."""
    while not isinstance(message := await receive(control.reader), Launch):
        control.writer.write(pack(Alive()))
    await own.connect(2, 3, 1, "far", ticket=message.ticket)
    assert await own.reader.readline() == b"question\n"
    own.writer.write(b"answer\n" + pack(NodeExited(7, "why")))
    return await own.reader.read()


@guarded
async def test_all_are_told_how_the_job_ended(nodes: ManualNodes, listener: socket.socket) -> None:
    waiting = asyncio.create_task(nodes.wait(GUARD_SECONDS, "here:1"))
    dialer = Dialer(listener)
    assert await dialer.join(1) == Alive()
    waiting.cancel()
    await asyncio.wait([waiting])
    closing = asyncio.create_task(asyncio.to_thread(nodes.close, 75))
    assert await receive(dialer.reader) == JobOver(75)
    dialer.writer.close()
    await closing
