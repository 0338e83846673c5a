"""Messages survive encoding and decoding; listeners prove who they are."""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import replace

import pytest
from node_jobs import JOB

from lockstep.diagnosis.flight_recorder import RecordedCollective
from lockstep.diagnosis.inspection import Frame, WorkerState
from lockstep.diagnosis.observed_steps import ObservedSteps, ProcessSteps
from lockstep.launch.plan.timings import Timings
from lockstep.launch.protocol import messages
from lockstep.launch.protocol.messages import KINDS, PROTOCOL, Message, MessageError, bytes_of, pack, text_of, unpack
from lockstep.launch.protocol.reachability import Listeners, listen, proof, reachable
from lockstep.world.interfaces import address_towards, addresses, interface_of

FAILURE = messages.WorkerFailure(rank=3, code=-9, age=0.5, text="ValueError: \u00d7", lost_peer=True, final=True)
JOB = replace(JOB, environment={"A": "1"}, added=("--run-dir", "run"), timings=Timings(silence=8.0))
STATE = WorkerState(
    *(0, 123, None, "S", False, 7, "forward", 4, True),
    stack=(Frame("/x.py", 3, "load", True),),
    operations=("allreduce.loss",),
    collectives=(RecordedCollective("0", 9, "all_reduce", "float[3]", False),),
)
STEPS = ObservedSteps(9, None, 8, 64, 7, 0.5, 2, 4, (0.5, 0.0, 0.25, 0.0, 0.0, 1.5), (0.125,) * 6)
EACH: list[Message] = [
    messages.Alive(),
    JOB,
    messages.Reach({"10.0.0.1": 4}),
    messages.Start("10.0.0.1", 4, "10.0.0.2"),
    messages.Signal(15),
    messages.Inspect(),
    messages.End(5.0),
    messages.NodeFailure("has no folder /x"),
    messages.NodeReady({"torch": "2"}, {"10.0.0.1": 4}),
    messages.Reached({"10.0.0.1": "10.0.0.2"}),
    messages.Started("why"),
    messages.Output(1, "stdout", text_of(b"\xff\xe2\n")),
    messages.Failing(),
    messages.NoProgress(300.5, (STATE,)),
    messages.PeersLeft((1, 0), lost_peer=True),
    messages.StepsObserved((ProcessSteps(3, 99, True, STEPS),), True, {"cpu": 1.5}, ("GPU: a reason",)),
    messages.Inspected((STATE, WorkerState(1, exit_code=0))),
    messages.Inspected((), "no answer within 10 s"),
    messages.Ended((FAILURE,), (7,), "the store"),
    messages.Ended(staying=2, must_lead=True, has_commit=True),
    messages.HostsChanged(3),
    messages.Leave(),
    messages.Knock(1, "00"),
    messages.Answer("p", "c"),
    messages.Introduction(1, 2, 1, "a", True, "00"),
    messages.Refused("why"),
    messages.Launch("00", stager=True),
    messages.Announcement("the job hung"),
    messages.JobOver(75),
    messages.NodeExited(1, "why"),
]


@pytest.mark.parametrize("message", EACH, ids=lambda message: type(message).__name__)
def test_each_comes_out_as_it_went_in(message: Message) -> None:
    line = pack(message)
    assert line.endswith(b"\n")
    assert b"\n" not in line[:-1]
    assert unpack(line) == message


def test_there_is_one_of_each_kind_here() -> None:
    assert {type(message) for message in EACH} == {*KINDS.values()}


def test_any_bytes_of_a_worker_arrive() -> None:
    message = unpack(pack(messages.Output(0, "stderr", text_of(bytes(range(256))))))
    assert isinstance(message, messages.Output)
    assert bytes_of(message.text) == bytes(range(256))


@pytest.mark.parametrize(
    "line", [b"", b"Welcome to node7\n", b"[1]\n", b"{}\n", b'{"is": "nothing"}\n', b'{"is": []}\n', b"\xff\n"]
)
def test_invalid_message_gives_none(line: bytes) -> None:
    assert unpack(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"is": "signal"}\n',
        b'{"is": "signal", "number": "15"}\n',
        b'{"is": "signal", "number": 15, "more": 1}\n',
        b'{"is": "ended", "failures": [{"rank": 1}]}\n',
        pack(JOB).replace(b'"silence": 8.0', b'"silence": 0.0'),
    ],
)
def test_a_damaged_message_is_an_error_that_names_it(line: bytes) -> None:
    with pytest.raises(MessageError, match=r"^[a-z]+: "):
        unpack(line)


def test_another_version_is_recognized_and_can_be_answered() -> None:
    other = pack(JOB).replace(f'"protocol": {PROTOCOL}'.encode(), b'"protocol": 99').replace(b'"node": 0', b'"knot": 0')
    assert isinstance(unpack(other), messages.Foreign)
    assert unpack(b'{"is": "error", "text": "has another"}') == messages.NodeFailure("has another")


SECONDS = 60.0


def test_right_wrong_and_closed_listeners_are_distinguished() -> None:
    async def knock() -> tuple[dict[str, str], int]:
        listeners = Listeners("secret", [("lo", "127.0.0.1"), ("lo", "127.0.0.2")], SECONDS)
        await listeners.answer()
        impostor = Listeners("other", [("lo", "127.0.0.3")], SECONDS)
        await impostor.answer()
        with listen("127.0.0.4") as closed:
            port = closed.getsockname()[1]
        found = await reachable({**listeners.open, **impostor.open, "127.0.0.4": port}, "secret", SECONDS)
        taken = listeners.take("127.0.0.2")
        address, port = taken.getsockname()
        assert address == "127.0.0.2"
        taken.close()
        impostor.take("127.0.0.3").close()
        return found, port

    found, port = asyncio.run(knock())
    assert set(found) == {"127.0.0.1", "127.0.0.2"}
    assert all(ipaddress.ip_address(own).is_loopback for own in found.values())
    assert port > 0


def test_listener_proves_nothing_unasked_nor_the_same_twice() -> None:
    async def knock() -> tuple[bytes, list[bytes]]:
        listeners = Listeners("secret", [("lo", "127.0.0.1")], SECONDS)
        await listeners.answer()
        answers = []
        for challenge in (b"a" * 16, b"b" * 16):
            reader, writer = await asyncio.open_connection("127.0.0.1", listeners.open["127.0.0.1"])
            writer.write(challenge)
            answers.append(await reader.read())
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners.open["127.0.0.1"])
        writer.write_eof()
        silence = await reader.read()
        writer.close()
        listeners.take("127.0.0.1").close()
        return silence, answers

    silence, answers = asyncio.run(knock())
    assert silence == b""
    assert answers == [proof("secret", "door", b"a" * 16), proof("secret", "door", b"b" * 16)]
    assert answers[0] != answers[1]


def test_addresses_are_those_that_others_may_reach() -> None:
    own = addresses()
    assert all(not ipaddress.ip_address(address).is_loopback for _, address in own)
    assert addresses(only=["no-such-interface"]) == []
    for name, address in own:
        assert interface_of(address) == name


def test_the_way_to_this_machine_is_its_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match="in use"), listen("127.0.0.1") as taken:
        listen("127.0.0.1", taken.getsockname()[1])
