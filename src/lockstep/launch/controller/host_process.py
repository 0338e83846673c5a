"""A process of Lockstep on a host, connected by lines: started here, directly or through ssh or similar, or relayed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from lockstep.errors import reached_limit
from lockstep.launch.controller.start_errors import StartError
from lockstep.launch.plan.worker_variables import handed_on
from lockstep.launch.protocol.handshake import SealedLines
from lockstep.launch.protocol.messages import LIMIT_BYTES, MessageError, NodeExited, unpack

STDERR_BYTES = 1 << 13
EXITED = b'{"is": "nodeexited"'
STDERR_SECONDS = 1.0  # for the rest of the standard error of a process that has exited


class Subprocess:
    """A process on a host that is connected by its three standard streams, or those of ssh or similar."""

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
        return self._last.decode(errors="replace")

    async def readline(self) -> bytes:
        return await self._stdout.readline()

    def send(self, line: bytes) -> None:
        if not self.stdin.is_closing():
            self.stdin.write(line)

    async def wait(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([self._reading], timeout=STDERR_SECONDS)
        return code

    async def close(self, seconds: float) -> None:
        process = self._process
        self._reading.cancel()
        self.stdin.close()
        with suppress(TimeoutError):
            try:
                await asyncio.wait_for(process.wait(), seconds)
            finally:  # also if this is cancelled
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


class RelayedProcess:
    """A process on a manually started node, which carries its lines."""

    def __init__(self, lines: SealedLines) -> None:
        self._lines = lines
        self._end = NodeExited(1, "")
        self._ended = asyncio.Event()

    @property
    def exit_code(self) -> int | None:
        return self._end.code if self._ended.is_set() else None

    @property
    def last_lines(self) -> str:
        return self._end.stderr

    async def readline(self) -> bytes:
        try:
            line = await self._lines.readline()
            if line.startswith(EXITED) and isinstance(end := unpack(line), NodeExited):
                self._end, line = end, b""
        except MessageError as error:
            self._end, line = NodeExited(1, str(error)), b""
            self._lines.writer.transport.abort()
        if not line:
            self._ended.set()
        return line

    def send(self, line: bytes) -> None:
        self._lines.send(line)

    async def wait(self) -> int:
        await self._ended.wait()
        return self._end.code

    async def close(self, seconds: float) -> None:
        with suppress(OSError):
            self._lines.writer.write_eof()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._read_to_end(), seconds)
        self._lines.writer.transport.abort()

    async def _read_to_end(self) -> None:
        while not self._ended.is_set():
            await self.readline()


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
