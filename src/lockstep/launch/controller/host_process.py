"""A process of Lockstep on a host, connected by lines: started here, directly or through ssh or similar."""

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
STDERR_SECONDS = 1.0  # for the rest of the standard error of a process that has exited


class Subprocess:
    """A process on a host that is connected by its three standard streams, or those of ssh or similar.

    `RelayedProcess` is one on a manually started node, and has the same methods.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin
        assert process.stdout
        self.stdin = process.stdin
        self._stdout = process.stdout
        self._process = process
        self._last = bytearray()
        self._reading = asyncio.create_task(self._read_last_lines())

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def last_lines(self) -> str:
        """The end of its standard error: that of ssh or similar, or of Python on the host."""
        return self._last.decode(errors="replace")

    async def readline(self) -> bytes:
        return await self._stdout.readline()

    def send(self, line: bytes) -> None:
        """Send it a line, unless it has disconnected."""
        if not self.stdin.is_closing():
            self.stdin.write(line)

    async def wait(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([self._reading], timeout=STDERR_SECONDS)
        return code

    async def close(self, seconds: float) -> None:
        """Close the connection, and kill the process if it does not exit in time."""
        process = self._process
        self._reading.cancel()
        self.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
        if process.returncode is None:
            process.kill()
            with suppress(TimeoutError):  # asyncio also waits for the pipes, which an orphaned process may hold open
                await asyncio.wait_for(process.wait(), seconds)
        with suppress(OSError):  # a broken pipe, which asyncio would otherwise log as an unhandled error
            await asyncio.wait_for(self.stdin.wait_closed(), seconds)
        process._transport.close()  # type: ignore[attr-defined]  # and its other streams, which any process may have

    async def _read_last_lines(self) -> None:
        assert self._process.stderr
        while chunk := await self._process.stderr.read(STDERR_BYTES):
            self._last += chunk
            del self._last[:-STDERR_BYTES]


async def start_process(command: Sequence[str], is_here: bool, pass_fds: Sequence[int] = ()) -> Subprocess:
    """Start it, connected by its three standard streams.

    Args:
        is_here: Whether it runs on this host.

    Raises:
        StartError: The command cannot be run.
    """
    try:
        process = await asyncio.create_subprocess_exec(
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
    return Subprocess(process)
