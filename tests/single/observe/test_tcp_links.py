"""What the kernel says of this process's TCP connections, and what is made of it."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from time_limits import wait_until

from lockstep.observe.tcp_links import MAX_LINKS, Connection, LinkReader, own_connections, read_address, read_info

HERE, THERE = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
SENT_BYTES = 1_000_000


def _info(state: int, **fields: int) -> bytes:
    """Return a struct tcp_info as Linux 6.18 has it: 248 bytes."""
    offsets = {"tcpi_rtt": (68, "I"), "tcpi_total_retrans": (100, "I"), "tcpi_bytes_acked": (120, "Q")}
    offsets |= {"tcpi_busy_time": (168, "Q"), "tcpi_rwnd_limited": (176, "Q")}
    data = bytearray(248)
    data[0] = state
    for name, value in fields.items():
        offset, kind = offsets[f"tcpi_{name}"]
        struct.pack_into(kind, data, offset, value)
    return bytes(data)


def test_the_time_in_which_the_peer_takes_no_data_is_left_out() -> None:
    fields = {"rtt": 250, "total_retrans": 3, "bytes_acked": 5 << 33, "busy_time": 900, "rwnd_limited": 200}
    assert read_info(_info(1, **fields)) == Connection(5 << 33, 700, 3, 250)
    assert read_info(_info(8, **fields)) is None, "the peer has closed it"
    assert read_info(_info(1, **fields)[:104]) is None, "a kernel before Linux 4.10"


@pytest.mark.parametrize(
    ("family", "data", "address"),
    [
        (socket.AF_INET, b"\x01\xbb" + HERE + bytes(8), HERE),
        (socket.AF_INET6, b"\x01\xbb" + bytes(4) + bytes(10) + b"\xff\xff" + HERE + bytes(4), HERE),
        (
            socket.AF_INET6,
            b"\x01\xbb" + bytes(4) + b"\xfd" + bytes(14) + b"\x07" + bytes(4),
            b"\xfd" + bytes(14) + b"\x07",
        ),
    ],
)
def test_addresses_of_both_families_are_read(family: int, data: bytes, address: bytes) -> None:
    assert read_address(int(family).to_bytes(2, sys.byteorder) + data) == (address, b"\x01\xbb")
    assert read_address(int(socket.AF_UNIX).to_bytes(2, sys.byteorder) + data) == (b"", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts them")
def test_own_connections_are_read_without_changing_them() -> None:
    socket.setdefaulttimeout(5.0)  # which a socket object of the same descriptor would get, and the descriptor with it
    try:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            server = stack.enter_context(listener.accept()[0])
            client.setblocking(True)
            client.sendall(bytes(SENT_BYTES // 100))
            assert server.recv(SENT_BYTES, socket.MSG_WAITALL)
            ports = b"".join(each.getsockname()[1].to_bytes(2, "big") for each in (client, server))

            def acknowledged() -> int:
                return dict(own_connections())[b"\x7f\0\0\1", b"\x7f\0\0\1", ports].acknowledged

            wait_until(lambda: acknowledged() >= SENT_BYTES // 100)
            assert client.gettimeout() is None
            assert LinkReader().take() == ()
    finally:
        socket.setdefaulttimeout(None)


def test_links_have_the_sums_since_the_last_report() -> None:
    """Two connections send at the same time, so their busy times are not added."""
    readings: list[dict[tuple[bytes, bytes, bytes], Connection]] = [
        {(HERE, THERE, b"1"): Connection(SENT_BYTES, 500_000, 1, 100)},
        {
            (HERE, THERE, b"1"): Connection(5 * SENT_BYTES, 1_500_000, 4, 300),
            (HERE, THERE, b"2"): Connection(SENT_BYTES, 500_000, 0, 200),  # since the first reading
            (HERE, HERE, b"3"): Connection(SENT_BYTES, 500_000, 0, 200),
            (b"\x7f\0\0\1", b"\x7f\0\1\1", b"4"): Connection(SENT_BYTES, 500_000, 0, 200),
            **{(HERE, bytes([10, 0, 1, host]), b"5"): Connection(10_000 * host) for host in range(1, 100)},
        },
    ]

    def connections() -> Iterator[tuple[tuple[bytes, bytes, bytes], Connection]]:
        yield from readings.pop(0).items()

    reader = LinkReader(connections, iter((100.0, 102.0)).__next__)
    assert reader.take() == ()
    busiest, *others = reader.take()
    assert (busiest.bytes_per_second, busiest.busy) == (5 * SENT_BYTES / 2, 0.5)
    assert (busiest.resent, busiest.round_trip) == (3, 300)
    assert len(others) == MAX_LINKS - 1
    assert [each.bytes_per_second for each in others] == [495_000, 490_000]
