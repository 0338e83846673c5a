"""Reads from the kernel how this process's TCP connections to other hosts do: those of Gloo, and of NCCL over sockets.

The kernel counts for each connection what the peer has acknowledged, and the time in which data was on its way. Reading
that needs no rights, and changes nothing. A descriptor costs about 1 us, one of a connection 10 us.

Source: tcp(7), `struct tcp_info` in linux/tcp.h since Linux 4.10, and tcp_get_info() in net/ipv4/tcp.c.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from lockstep.diagnosis.observed_steps import LinkUse

MAX_LINKS = 3  # the busiest; a ring or a tree of workers has at most 3 neighbors
MIN_BYTES = 100_000  # between two reports; gradients are more
TCP_INFO, ESTABLISHED = 11, 1
INFO = struct.Struct("=B67xI28xI16xQ40xQQ")  # state, round trip, segments resent, bytes acknowledged, times
MAPPED = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address in an IPv6 one
LOOPBACK = 127


class Connection(NamedTuple):
    """What the kernel has counted for a connection; `busy`: microseconds in which sent data was not acknowledged.

    The time in which the peer took no more data is left out: then the peer is slow, and not the link.
    """

    acknowledged: int = 0
    busy: int = 0
    resent: int = 0
    round_trip: int = 0


Ends = tuple[bytes, bytes, bytes]  # the own address, the peer's, and the two ports


class LinkReader:
    """Reads what this process has sent to each address of other hosts since the last `take`."""

    def __init__(
        self,
        connections: Callable[[], Iterator[tuple[Ends, Connection]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections, self._clock = connections or own_connections, clock
        self._last: dict[Ends, Connection] = {}
        self._time = 0.0  # 0: nothing was read yet

    def take(self) -> tuple[LinkUse, ...]:
        """Return the links that sent most since the last call; none at the first one."""
        readings, now = dict(self._connections()), self._clock()
        last, seconds, is_first = self._last, now - self._time, not self._time
        self._last, self._time = readings, now
        if is_first:
            return ()
        links: dict[tuple[bytes, bytes], list[LinkUse]] = {}
        for (own, peer, ports), new in readings.items():
            old = last.get((own, peer, ports), Connection())
            if new.acknowledged > old.acknowledged and own != peer and own[0] != LOOPBACK:
                sent = int((new.acknowledged - old.acknowledged) / seconds)
                busy = min(1.0, round((new.busy - old.busy) / 1e6 / seconds, 3))
                link = LinkUse(zlib.crc32(own), zlib.crc32(peer), sent, busy, new.resent - old.resent, new.round_trip)
                links.setdefault((own, peer), []).append(link)
        used = [total_use(each) for each in links.values()]
        used = [link for link in used if link.bytes_per_second * seconds >= MIN_BYTES]
        return tuple(sorted(used, key=lambda link: -link.bytes_per_second)[:MAX_LINKS])


def total_use(links: Sequence[LinkUse]) -> LinkUse:
    """Return the use of a link by several, which send at the same time: it is busy as long as the busiest of them."""
    _, _, sent, busy, resent, round_trip = zip(*map(astuple, links), strict=True)
    return LinkUse(links[0].own, links[0].peer, sum(sent), max(busy), sum(resent), max(round_trip))


def own_connections() -> Iterator[tuple[Ends, Connection]]:
    """Yield this process's established TCP connections.

    The C library is asked by itself: a socket object of Python would set the program's default timeout.
    """
    if sys.platform != "linux":
        return
    c_library = ctypes.CDLL(None)
    for name in os.listdir("/proc/self/fd"):
        data = _ask(c_library.getsockopt, int(name), socket.IPPROTO_TCP, TCP_INFO)
        if reading := read_info(data):
            own, own_port = read_address(_ask(c_library.getsockname, int(name)))
            peer, peer_port = read_address(_ask(c_library.getpeername, int(name)))
            if own and peer:
                yield (own, peer, own_port + peer_port), reading


def read_info(data: bytes) -> Connection | None:
    """Return what a `struct tcp_info` says; None if it is too short, or of a connection that is not established."""
    if len(data) < INFO.size:
        return None
    state, round_trip, resent, acknowledged, busy, refused = INFO.unpack_from(data)
    return Connection(acknowledged, busy - refused, resent, round_trip) if state == ESTABLISHED else None


def _ask(call: Callable[..., int], *arguments: Any) -> bytes:
    """Return what a call writes to a buffer; nothing if it fails, as for other files."""
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    failed = call(*arguments, buffer, ctypes.byref(size))
    return b"" if failed else buffer.raw[: size.value]


def read_address(data: bytes) -> tuple[bytes, bytes]:
    """Return the address and the port in a `struct sockaddr`; none if it is of another family."""
    family = int.from_bytes(data[:2], sys.byteorder)
    if family == socket.AF_INET:
        return data[4:8], data[2:4]
    return (data[8:24].removeprefix(MAPPED), data[2:4]) if family == socket.AF_INET6 else (b"", b"")
