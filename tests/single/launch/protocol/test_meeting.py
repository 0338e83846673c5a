"""Nodes that are started manually meet, tell each other of failures and losses, and keep strangers out."""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol import meeting as module
from lockstep.launch.protocol.handshake import MeetingError, Newcomer, StrangerError, Streams, admit, introduce
from lockstep.launch.protocol.meeting import Meeting
from lockstep.launch.protocol.messages import (
    PROTOCOL,
    Alive,
    Answer,
    FailedElsewhere,
    Introduction,
    Knock,
    Refused,
    Terms,
    WorkerFailure,
    pack,
    receive,
    unpack,
)
from lockstep.launch.protocol.reachability import listen

GUARD_SECONDS = 100.0
HOME = "127.0.0.1"
FAILURES = (WorkerFailure(rank=3, code=1, age=0.5, text="ValueError: no"),)
USUAL = Timings()


def guarded(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop, in which no task may fail unseen."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        problems: list[dict[str, Any]] = []

        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem))
            async with asyncio.timeout(GUARD_SECONDS):
                await test(*arguments, **options)

        asyncio.run(bounded())
        assert not problems

    return run


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def join(
    listener: socket.socket, node: int, nodes: int, secret: str = "", timings: Timings = USUAL
) -> asyncio.Task[Meeting]:
    address, port, *_ = listener.getsockname()
    return asyncio.create_task(Meeting.join(address, port, node, nodes, 1, secret, timings))


def lead(
    listener: socket.socket,
    nodes: int,
    secret: str = "",
    timings: Timings = USUAL,
    turned_away: list[str] | None = None,
) -> asyncio.Task[Meeting]:
    complaints = [] if turned_away is None else turned_away
    return asyncio.create_task(Meeting.lead(listener, nodes, 1, secret, "job", timings, complaints))


async def meet(nodes: int) -> list[Meeting]:
    with listen(HOME) as listener:
        return await asyncio.gather(lead(listener, nodes), *(join(listener, node, nodes) for node in range(1, nodes)))


async def close(*meetings: Meeting) -> None:
    await asyncio.gather(*(each.close() for each in meetings))


async def dial(listener: socket.socket, newcomer: Newcomer, secret: str = "") -> Streams:
    """Join with a connection that says and does nothing more."""
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, listener.getsockname())
    return await introduce(connection, newcomer, secret)


async def refusal(reader: asyncio.StreamReader) -> str:
    """Why the first node refuses who reads this."""
    message = await receive(reader)
    assert isinstance(message, Refused)
    return message.why


async def gone(reader: asyncio.StreamReader) -> None:
    """Wait for the end of a connection."""
    with suppress(ConnectionError):
        await reader.read()


async def still_waits(leading: asyncio.Task[Meeting], stranger: asyncio.StreamWriter) -> None:
    """The first node has dropped a stranger and waits for the others; end it."""
    stranger.close()
    assert not leading.done()
    leading.cancel()
    await asyncio.wait([leading])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secret", ["", "secret"])
@guarded
async def test_all_nodes_get_the_first_ones_terms(address: str, secret: str) -> None:
    with listen(address) as listener:
        port = port_of(listener)
        meetings = await asyncio.gather(
            Meeting.join(address, port, 2, 3, 4, secret, USUAL, own=address),
            Meeting.join(address, port, 1, 3, 8, secret, USUAL),
            Meeting.lead(listener, 3, 2, secret, "run 7", USUAL, []),
        )
    assert [each.terms for each in meetings] == [Terms((2, 8, 4), "run 7")] * 3
    await close(*meetings)


@guarded
async def test_single_node_connects_to_no_other() -> None:
    with listen(HOME) as listener:
        alone = await Meeting.lead(listener, 1, 2, "secret", "job", USUAL, [])
    assert alone.terms == Terms((2,), "job")
    await alone.report(FAILURES)
    await alone.finish()
    await alone.close()


@guarded
async def test_a_node_tries_until_the_first_one_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()
    connect = module._connect

    async def seen(address: str, port: int, own: str) -> socket.socket:
        try:
            return await connect(address, port, own)
        except ConnectionRefusedError:
            refused.set()
            raise

    monkeypatch.setattr(module, "_connect", seen)
    with socket.socket() as listener:
        listener.bind((HOME, 0))
        early = join(listener, 1, 2, timings=Timings(reconnect=0.01))
        await refused.wait()
        listener.listen()
        await close(await lead(listener, 2), await early)


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"[1]\n", b'{"is": "answer", "proof": 1}\n', b"x" * 100_000]
)
@guarded
async def test_a_node_takes_no_stranger_for_the_first_node(answer: bytes) -> None:
    with listen(HOME) as listener:
        listener.setblocking(False)
        node = join(listener, 1, 2, timings=Timings(reconnect=0.01))
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            await asyncio.get_running_loop().sock_sendall(connection, answer)
        await close(await lead(listener, 2), await node)


@guarded
async def test_a_node_leaves_a_silent_stranger() -> None:
    with listen(HOME) as listener:
        listener.setblocking(False)
        timings = Timings(connect=1.0)
        node = join(listener, 1, 2, timings=timings)
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            await close(await lead(listener, 2), await node)


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b"\xff\xfe\n",
    b"x" * 100_000,
    b"[" * 1000 + b"\n",
    b"{}\n{}\n",
    pack(Knock(1, "")).replace(b"1", b'"1"', 1),
    pack(Knock(1, "no hexadecimal digits")),
    pack(Knock(1, "00")),
    pack(Alive()),
]


@pytest.mark.parametrize("secret", ["", "secret"])
@guarded
async def test_strangers_do_not_stop_or_delay_a_meeting(secret: str) -> None:
    patient = Timings(connect=2 * GUARD_SECONDS)  # so none is waited for
    with listen(HOME) as listener:
        leading = lead(listener, 3, secret, patient)
        silent = [await asyncio.open_connection(HOME, port_of(listener)) for _ in range(5)]
        silent[1][1].write(b'{"protocol": ')
        silent[2][1].write_eof()
        for nonsense in STRANGE:
            reader, writer = await asyncio.open_connection(HOME, port_of(listener))
            writer.write(nonsense)
            await gone(reader)
            writer.close()
        meetings = await asyncio.gather(leading, join(listener, 1, 3, secret), join(listener, 2, 3, secret))
        for reader, writer in silent:
            await gone(reader)
            writer.close()
    assert {each.terms for each in meetings} == {Terms((1, 1, 1), "job")}
    await close(*meetings)


@guarded
async def test_a_silent_stranger_is_dropped() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 2, timings=Timings(reconnect=0.01, connect=0.05))
        reader, writer = await asyncio.open_connection(HOME, port_of(listener))
        await gone(reader)
        await still_waits(leading, writer)


@pytest.mark.parametrize(
    ("first", "other", "why", "reported"),
    [
        ("secret", "other", "node 0 at {} does not know this job's secret", "has another LOCKSTEP_JOB_SECRET"),
        ("secret", "", "the first node has LOCKSTEP_JOB_SECRET", ""),
        ("", "secret", "this node has LOCKSTEP_JOB_SECRET", ""),
    ],
)
@guarded
async def test_a_node_with_another_secret_is_kept_out_and_hears_why(
    first: str, other: str, why: str, reported: str
) -> None:
    turned_away: list[str] = []
    with listen(HOME) as listener:
        leading = lead(listener, 2, first, turned_away=turned_away)
        with pytest.raises(MeetingError, match=why.format(f"{HOME}:{port_of(listener)}")):
            await join(listener, 1, 2, other)
        await until(lambda: bool(turned_away))
        assert not leading.done()
        await close(*await asyncio.gather(leading, join(listener, 1, 2, first)))
    (line,) = turned_away
    assert line.startswith(f"the node at {HOME} ")
    assert reported in line


class Recorder:
    """A stranger on the way between two nodes, who keeps what each of them says."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.said: tuple[list[bytes], list[bytes]] = ([], [])  # by the node that connects, by the first one

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOME, self._port)
        await asyncio.gather(self._copy(reader, back, self.said[0]), self._copy(there, writer, self.said[1]))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: list[bytes]) -> None:
        while line := await reader.readline():
            said.append(line)
            writer.write(line)
        writer.close()


async def record(secret: str) -> tuple[list[bytes], list[bytes]]:
    """What the nodes 1 and 0 say to each other when they meet."""
    with listen(HOME) as listener:
        recorder = Recorder(port_of(listener))
        server = await asyncio.start_server(recorder.carry, HOME, 0)
        meetings = await asyncio.gather(lead(listener, 2, secret), join(server.sockets[0], 1, 2, secret))
        await close(*meetings)
        server.close()
    return recorder.said


@guarded
async def test_replayed_messages_of_a_node_do_not_open_another_meeting() -> None:
    said, _ = await record("secret")
    with listen(HOME) as listener:
        turned_away: list[str] = []
        leading = lead(listener, 2, "secret", turned_away=turned_away)
        reader, writer = await asyncio.open_connection(HOME, port_of(listener))
        writer.write(said[0])
        await reader.readline()
        writer.write(said[1])
        await gone(reader)
        assert turned_away
        await still_waits(leading, writer)


@guarded
async def test_replayed_messages_of_the_first_node_attract_no_node() -> None:
    _, said = await record("secret")

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for line in said:
            await reader.readline()
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(play, HOME, 0)
    with pytest.raises(MeetingError, match="does not know this job's secret"):
        await join(server.sockets[0], 1, 2, "secret")
    server.close()


@guarded
async def test_the_first_nodes_own_proof_opens_no_meeting() -> None:
    with listen(HOME) as listener:
        for node in (0, 1):
            leading = lead(listener, 2, "secret")
            reader, writer = await asyncio.open_connection(HOME, port_of(listener))
            writer.write(pack(Knock(node, "00" * 16)))
            answer = unpack(await reader.readline())
            assert isinstance(answer, Answer)
            writer.write(pack(Introduction(answer.proof, nodes=2, workers=1, host="mirror")))
            await gone(reader)
            await still_waits(leading, writer)


@guarded
async def test_another_version_is_refused() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 2)
        reader, writer = await asyncio.open_connection(HOME, port_of(listener))
        writer.write(pack(Knock(1, "", PROTOCOL + 1)))
        assert "another version of Lockstep" in (await refusal(reader))
        writer.close()
        await close(*await asyncio.gather(leading, join(listener, 1, 2)))


@guarded
async def test_a_node_that_does_not_fit_is_refused_and_the_others_meet() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 3)
        with pytest.raises(MeetingError, match=r"one of 4 nodes, but the first node has --nodes 3; use the same"):
            await join(listener, 1, 4)
        with pytest.raises(MeetingError, match="a number from 1 to 2"):
            await join(listener, 3, 3)
        for node in (0, 3, -1):
            reader, writer = await dial(listener, Newcomer(node, 3, 1, "odd"))
            assert "a number from 1 to 2" in (await refusal(reader))
            writer.close()
        twins = [join(listener, 1, 3), join(listener, 1, 3)]
        (refused,), (first,) = await asyncio.wait(twins, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(MeetingError, match=f"node 1 has already joined, from {socket.gethostname()}; .*-rank"):
            await refused
        await close(*await asyncio.gather(leading, first, join(listener, 2, 3)))


@guarded
async def test_an_address_that_is_not_here_is_an_error() -> None:
    with listen(HOME) as listener, pytest.raises(MeetingError, match=r"cannot connect from 192\.0\.2\.1"):
        await Meeting.join(HOME, port_of(listener), 1, 2, 1, "", USUAL, own="192.0.2.1")


@guarded
async def test_a_node_that_leaves_before_all_are_there_may_come_again() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 3)
        reader, writer = await dial(listener, Newcomer(1, 3, 7, "first try"))
        assert await receive(reader) == Alive()  # it is registered
        writer.close()
        await writer.wait_closed()
        again = None
        while not again:  # until its end is known
            reader, writer = await dial(listener, Newcomer(1, 3, 5, "second try"))
            again = await receive(reader) == Alive()
            if not again:
                writer.close()
        first, other = await asyncio.gather(leading, join(listener, 2, 3))
        assert first.terms == other.terms == Terms((1, 5, 1), "job")
        assert not first._verdict.done()
        writer.close()
        await close(first, other)


@guarded
async def test_first_node_stopped_before_all_connect_can_lead_again() -> None:
    with listen(HOME) as listener:
        stopped = lead(listener, 4)
        early = join(listener, 1, 4)
        reader, writer = await dial(listener, Newcomer(2, 4, 1, "there"))
        assert await receive(reader) == Alive()
        stopped.cancel()
        await gone(reader)  # neither is its connection left
        writer.close()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        meetings = await asyncio.gather(lead(listener, 4), early, join(listener, 2, 4), join(listener, 3, 4))
    await close(*meetings)


@guarded
async def test_listener_of_a_stopped_first_node_accepts_again() -> None:
    with listen(HOME) as listener:
        listener.setblocking(True)
        stopped = lead(listener, 2)
        stranger, writer = await asyncio.open_connection(HOME, port_of(listener))
        writer.write(b"x" * 100_000)
        await gone(stranger)  # so it accepts
        writer.close()
        stopped.cancel()
        await asyncio.wait([stopped])
        with socket.create_connection(listener.getsockname()) as caller:
            connection, address = listener.accept()
            connection.close()
            assert address == caller.getsockname()
        await close(*await asyncio.gather(lead(listener, 2), join(listener, 1, 2)))


@guarded
async def test_a_node_that_is_stopped_before_all_are_there_disconnects() -> None:
    with listen(HOME) as listener:
        listener.setblocking(False)
        stopped = join(listener, 1, 2)
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        _, (reader, writer) = await admit(connection, "")
        assert await receive(reader) == Alive()
        stopped.cancel()
        await gone(reader)
        writer.close()
        with pytest.raises(asyncio.CancelledError):
            await stopped


@guarded
async def test_no_node_is_accepted_after_the_last_one() -> None:
    with listen(HOME) as listener:
        meetings = await asyncio.gather(lead(listener, 2), join(listener, 1, 2))
        callers = [await asyncio.open_connection(HOME, port_of(listener)) for _ in range(3)]
        assert listener.gettimeout() is None  # blocking, as it was
        for _, writer in callers:
            connection, caller = listener.accept()
            assert caller == writer.get_extra_info("sockname")
            connection.close()
            writer.close()
    await close(*meetings)


@pytest.mark.parametrize("teller", [0, 1])
@guarded
async def test_a_verdict_reaches_all_others(teller: int) -> None:
    meetings = await meet(3)
    others = [each for each in meetings if each is not meetings[teller]]
    await meetings[teller].report(FAILURES)
    for other in others:
        assert await other.verdict() == FailedElsewhere(socket.gethostname(), FAILURES)
    await meetings[teller].close()  # and reads what comes until then
    assert not meetings[teller]._verdict.done()
    await close(*meetings)


@pytest.mark.parametrize("teller", [0, 1])
@guarded
async def test_a_long_verdict_arrives_although_its_node_ends_at_once(teller: int) -> None:
    meetings = await meet(3)
    long = tuple(WorkerFailure(rank, code=1, age=0, text="x" * 20_000) for rank in range(100))
    for peer in meetings[teller]._peers.values():  # it cannot be sent all at once
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    await meetings[teller].report(long)
    await meetings[teller].close()
    for other in meetings:
        if other is not meetings[teller]:
            assert (await other.verdict()).failures == long
    await close(*meetings)


@guarded
async def test_a_lost_node_is_a_verdict_on_all_others() -> None:
    with listen(HOME) as listener:
        leading, joining = lead(listener, 3), join(listener, 1, 3)
        _, writer = await dial(listener, Newcomer(2, 3, 1, "far-away"))
        meetings = await asyncio.gather(leading, joining)
    writer.transport.abort()
    for other in meetings:
        assert await other.verdict() == FailedElsewhere("far-away", ())
    await close(*meetings)


@guarded
async def test_the_loss_of_the_first_node_is_a_verdict_on_all_others() -> None:
    first, *others = await meet(3)
    await first.close()
    for other in others:
        assert await other.verdict() == FailedElsewhere("the first node", ())
    await close(*others)


@guarded
async def test_a_silent_node_is_lost_but_those_that_live_are_not() -> None:
    with listen(HOME) as listener:
        leading, joining = lead(listener, 3), join(listener, 1, 3)
        reader, writer = await dial(listener, Newcomer(2, 3, 1, "silent"))
        meetings = await asyncio.gather(leading, joining)
    for other in meetings:  # the standstill is this loop's, in which both sides of a connection live
        other._timings = Timings(heartbeat=0.01, standstill=0.1, silence=0.5)
    for other in meetings:
        assert await other.verdict() == FailedElsewhere("silent", ())
    await gone(reader)
    writer.close()
    await close(*meetings)


@guarded
async def test_a_silent_first_node_is_lost() -> None:
    first, other = await meet(2)
    other._timings = Timings(heartbeat=0.01, standstill=0.1, silence=0.2)
    first._beating.cancel()
    assert await other.verdict() == FailedElsewhere("the first node", ())
    await close(first, other)


@guarded
async def test_node_that_was_suspended_does_not_blame_its_peer() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 2)
        _, writer = await dial(listener, Newcomer(1, 2, 1, "quiet"))
        first = await leading
    first._timings = Timings(heartbeat=0.01, standstill=0.2, silence=1.0)
    verdict = asyncio.create_task(first.verdict())
    await asyncio.sleep(0)
    time.sleep(1.5)  # the whole process stands still
    awake = time.monotonic()
    await until(lambda: verdict.done() or first._peers[1].heard > awake)
    assert not verdict.done()
    assert await verdict == FailedElsewhere("quiet", ())  # and then is missed
    writer.close()
    await first.close()


@pytest.mark.parametrize("late", [0, 1, 2])
@guarded
async def test_nodes_finish_together(late: int) -> None:
    meetings = await meet(3)
    finishing = {number: asyncio.create_task(meetings[number].finish()) for number in range(3) if number != late}
    if late:
        await until(lambda: len(meetings[0]._finished) == 2)
    else:
        await until(lambda: meetings[0]._finished == {1, 2})
    assert not any(task.done() for task in finishing.values())
    await meetings[late].finish()
    await asyncio.gather(*finishing.values())
    for each in meetings:  # the first node first: its end is no loss any more
        await each.close()
    assert not any(each._verdict.done() for each in meetings)


@guarded
async def test_a_node_that_has_finished_and_leaves_early_is_not_missed() -> None:
    first, early, other = await meet(3)
    finishing = asyncio.create_task(early.finish())
    await until(lambda: 1 in first._finished)
    finishing.cancel()
    await early.close()
    await asyncio.gather(first.finish(), other.finish())
    assert not first._verdict.done()
    await close(first, other)


@pytest.mark.parametrize("failed", [0, 2])
@guarded
async def test_a_verdict_ends_the_wait_for_the_others(failed: int) -> None:
    meetings = await meet(3)
    waiting = [each for each in meetings if each is not meetings[failed]]
    finishing = [asyncio.create_task(each.finish()) for each in waiting]
    await until(lambda: len(meetings[0]._finished) == len(waiting))
    await meetings[failed].report(FAILURES)
    await asyncio.gather(*finishing)
    for each in waiting:
        assert (await each.verdict()).failures == FAILURES
    await close(*meetings)


@guarded
async def test_a_lost_node_ends_the_wait_for_it() -> None:
    first, other, lost = await meet(3)
    finishing = [asyncio.create_task(each.finish()) for each in (first, other)]
    await lost.close()
    await asyncio.gather(*finishing)
    assert (await first.verdict()).failures == (await other.verdict()).failures == ()
    await close(first, other)


@guarded
async def test_invalid_message_is_skipped() -> None:
    with listen(HOME) as listener:
        leading = lead(listener, 2)
        _, writer = await dial(listener, Newcomer(1, 2, 1, "odd"))
        first = await leading
    for failures in ("1", "[1]", '[{"rank": 0}]'):
        writer.write(b'{"is": "verdict", "host": "odd", "failures": ' + failures.encode() + b"}\n")
    writer.write(b'nonsense\n{"is": "verdict", "host": 1}\n{"is": "no kind"}\n{"is": []}\n' + pack(Terms((), "")))
    writer.write(pack(FailedElsewhere("a\x1b[1mb", FAILURES)))
    assert await first.verdict() == FailedElsewhere("a\\x1b[1mb", FAILURES)
    assert first.terms == Terms((1, 1), "job")
    writer.close()
    await first.close()


@guarded
async def test_overlong_message_of_a_stranger_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        for each in (ours, theirs):
            each.setblocking(False)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(theirs, b" " * (1 << 24)))
        with pytest.raises(StrangerError):
            await introduce(ours, Newcomer(1, 2, 1, "here"), "")
        with pytest.raises(OSError, match=r"reset|pipe"):
            await sending
