"""Which addresses of a host others reach."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from lockstep.launch.protocol.reachability import Listeners, listen, proof, reachable
from lockstep.world.interfaces import address_towards, addresses, interface_of

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
