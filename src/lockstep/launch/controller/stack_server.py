"""Serve the state of a job's workers to `lockstep stacks`.

The socket has a name in Linux's abstract namespace (man 7 unix): no file is left when the launcher is killed. Any user
could connect to it, so both sides check that the peer's process belongs to their user.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config.mapping import from_mapping
from lockstep.diagnosis.inspection import WorkerState
from lockstep.errors import ConfigError
from lockstep.files.untrusted import parse_json

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ANSWER_SECONDS = 20.0
States = Sequence[tuple[str, WorkerState]]


@asynccontextmanager
async def serving(states: Callable[[], Awaitable[States]], command: str) -> AsyncIterator[None]:
    """Answer each connection with the states of all workers, while the block runs.

    Args:
        states: Return the hosts and states of the workers.
        command: The job's command, as typed.
    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError), closing(writer):
            if _is_ours(writer.get_extra_info("socket")):
                workers = [{"host": host, **asdict(state)} for host, state in await states()]
                writer.write(json.dumps({"command": command, "workers": workers}).encode())
                await writer.drain()

    server = None
    with suppress(OSError):  # the job does not depend on it
        if sys.platform == "linux":
            server = await asyncio.start_unix_server(answer, _address(os.getpid()))
    try:
        yield
    finally:
        if server:
            server.close()


def launchers() -> list[int]:
    """Return the processes of this user's launchers in this network namespace."""
    if sys.platform != "linux":
        return []
    prefix = "@" + _address(0).removeprefix("\0").removesuffix("0")
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()  # any program may choose its names
    names = {fields[-1] for line in lines if (fields := line.split())}
    numbers = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return sorted(int(number) for number in numbers if number.isascii() and number.isdecimal())


def ask(pid: int) -> tuple[str, list[tuple[str, WorkerState]]]:
    """Return a launcher's command and the hosts and states of its workers.

    Raises:
        OSError: The launcher is gone, does not answer within 20 s, or runs another version of Lockstep.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(_address(pid))
        if not _is_ours(connection):
            raise PermissionError(f"process {pid} is another user's")
        content = b""
        while part := connection.recv(1 << 16):
            content += part
    try:
        found: dict[str, Any] = parse_json(content)
    except ValueError:
        raise OSError(f"launcher {pid} closed the connection") from None
    try:
        workers = [(str(each.pop("host")), from_mapping(WorkerState, each, "worker")) for each in found["workers"]]
    except ConfigError as error:
        raise OSError(f"it runs another version of Lockstep ({error})") from None
    return str(found["command"]), workers


def _address(pid: int) -> str:
    return f"\0lockstep-launcher-{os.getuid()}-{pid}"


def _is_ours(connection: socket.socket) -> bool:
    """Return whether the peer's process belongs to this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    _, user, _ = CREDENTIALS.unpack(credentials)
    return bool(user == os.getuid())
