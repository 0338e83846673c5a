"""asyncio streams for the pipes between a launcher, its node processes and their workers."""

from __future__ import annotations

import asyncio
import os

from lockstep.launch.protocol.messages import LIMIT_BYTES


async def reader_of(descriptor: int) -> asyncio.StreamReader:
    """Return a reader of a pipe."""
    reader = asyncio.StreamReader(limit=LIMIT_BYTES)
    pipe = os.fdopen(descriptor, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def writer_to(descriptor: int) -> asyncio.StreamWriter:
    """Return a writer to a pipe. `drain` waits until everything is written."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", 0)
    )
    transport.set_write_buffer_limits(high=0)
    return asyncio.StreamWriter(transport, protocol, None, loop)


def text_of(data: bytes) -> str:
    """Return any bytes as text for JSON."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
