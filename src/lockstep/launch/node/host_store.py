"""The process that serves the store of a generation's workers, on the first host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress

from lockstep.launch.forking.orders import NO_TORCH
from lockstep.launch.node.worker_starter import Child, Store, start_store


class HostStore:
    """The store's listening socket, and its process once that runs.

    Args:
        look: Seconds between checks of the process.
    """

    def __init__(self, listener: socket.socket, address: str, look: float) -> None:
        listener.setblocking(True)
        self.port: int = listener.getsockname()[1]
        self.description = Store(listener.fileno(), address, self.port)
        self._listener = listener
        self._look = look
        self._process: Child | None = None
        self._is_over = False

    def adopt(self, process: Child | None) -> None:
        """Let a forked process serve the store; without one, start a process at the first connection.

        So a job without torch does not import it.
        """
        self._process = process
        if not process:
            asyncio.get_running_loop().add_reader(self._listener, self._start)

    def _start(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._process = start_store(self.description)

    @property
    def pids(self) -> list[int]:
        return [self._process.pid] if self._process else []

    async def failure(self) -> str:
        """Wait until the process exits, which it never should; return the error."""
        while not self._process or self._is_over or (code := self._process.poll()) is None:
            await asyncio.sleep(self._look)
        if code == NO_TORCH:
            return f"{sys.executable} serves the workers' store, but has no torch: name their Python by --python"
        return f"the process that served the job's store exited with code {code}"

    def end(self) -> None:
        """End the process, so that no worker that stays waits there for one that is lost."""
        self._is_over = True
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        if self._process and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Listen no more; the process goes on unless it was ended."""
        if self._is_over and self._process:
            self._process.poll()  # reap it
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
