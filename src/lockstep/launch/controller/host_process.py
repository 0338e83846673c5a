"""A process of Lockstep on a host, started directly or through ssh or similar, and connected by its streams."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from lockstep.errors import reached_limit
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.worker_variables import handed_on
from lockstep.launch.protocol.messages import LIMIT_BYTES

STDERR_BYTES = 1 << 13


async def start_process(
    command: Sequence[str], is_here: bool, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start it, connected by its three standard streams.

    Args:
        is_here: Whether it runs on this host.

    Raises:
        StartError: The command cannot be run.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=LIMIT_BYTES,
            env=handed_on(os.environ) if is_here else dict(os.environ),
            pass_fds=pass_fds,
            start_new_session=True,  # the launcher handles Ctrl-C of the terminal
        )
    except OSError as error:
        raise StartError(f"cannot run {command[0]}: {reached_limit(error) or error.strerror}") from None


async def read_last_lines(process: asyncio.subprocess.Process, last: bytearray) -> None:
    """Keep the last bytes of a process's stderr: of ssh or similar, or of Python on the host."""
    assert process.stderr
    while chunk := await process.stderr.read(STDERR_BYTES):
        last += chunk
        del last[:-STDERR_BYTES]


async def end_process(process: asyncio.subprocess.Process, seconds: float) -> None:
    """Close the connection, and kill the process if it does not exit in time."""
    assert process.stdin
    process.stdin.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    if process.returncode is None:
        process.kill()
        with suppress(TimeoutError):  # asyncio also waits for the pipes, which an orphaned process may hold open
            await asyncio.wait_for(process.wait(), seconds)
    with suppress(OSError):  # a broken pipe, which asyncio would otherwise log as an unhandled error
        await asyncio.wait_for(process.stdin.wait_closed(), seconds)
    process._transport.close()  # type: ignore[attr-defined]  # and its other streams, which any process may have
