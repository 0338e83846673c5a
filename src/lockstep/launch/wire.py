"""Messages between the launcher and its node processes, over standard streams, and between nodes that are started
manually, over TCP: one JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from lockstep.untrusted import parse_json

# The agreement of both sides on these messages; hosts with another one have another Lockstep.
PROTOCOL = 3
NOBODY_SPOKE = 79  # the exit code of a node process that is told nothing: it could have been used
LIMIT_BYTES = 1 << 22  # a chunk of output is 64 KiB, of which JSON can make six times as much
HEARTBEAT_SECONDS = 0.5
# After which the other side is given up. TCP doubles its waits: what was sent just before a cut of 5 s is sent again
# 0.2, 0.6, 1.4, 3 and 6.3 s later, so that a job outlives such a cut only if 7 s of silence are not too much.
SILENCE_SECONDS = 9.0
STANDSTILL_SECONDS = 3.0  # a pause of this process, in which it could hear nobody


def pack(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message; None at the end of the stream. What is none, such as a login's greeting, is passed over."""
    while line := await reader.readline():
        try:
            message = parse_json(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            return message
    return None


async def reader_of(descriptor: int) -> asyncio.StreamReader:
    """What comes from a pipe."""
    reader = asyncio.StreamReader(limit=LIMIT_BYTES)
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def writer_to(descriptor: int) -> asyncio.StreamWriter:
    """Into a pipe; what has been drained has been written."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0)
    )
    transport.set_write_buffer_limits(high=0)
    return asyncio.StreamWriter(transport, protocol, None, loop)


def text_of(data: bytes) -> str:
    """Any bytes, as a text that JSON can carry."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
