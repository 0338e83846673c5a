"""Start a host's workers: forked from a preloaded process if that is safe, each as a new interpreter otherwise.

Either way a worker is a child of this process, leads its own session, ends when this process does, and has no stdin
unless its stderr is a terminal, which it then reads, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from lockstep.launch.forking.preloaded_process import MAX_AT_ONCE, NO_TORCH, Adopted, Order, Preloaded
from lockstep.launch.forking.python_command import NotForkedError, PythonCommand, python_command
from lockstep.launch.node import parent_death
from lockstep.launch.node.processes import adopt_orphans

Streams = tuple[int, int]  # the descriptors of stdout and stderr
Child = subprocess.Popen[bytes] | Adopted


class HostStore:
    """The store of a generation's workers, on the first host: its listening socket, and its process once that runs.

    Args:
        look: Seconds between checks of the process.
    """

    def __init__(self, listener: socket.socket, address: str, look: float) -> None:
        listener.setblocking(True)
        self.address = address
        self.port: int = listener.getsockname()[1]
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
        place = (self.descriptor, self.address, self.port)
        code = f"from lockstep.launch.forking.preloaded_process import serve_store; serve_store(*{place})"
        self._process = subprocess.Popen(
            parent_death.command([sys.executable, "-P", "-c", code]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self.descriptor],
            start_new_session=True,
        )

    @property
    def descriptor(self) -> int:
        return self._listener.fileno()

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
        if self.descriptor >= 0:
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


class WorkerStarter:
    """Starts the workers of one host in each generation."""

    def __init__(self) -> None:
        adopt_orphans()  # the forked workers
        self._preloaded: Preloaded | None = None
        self._command: Sequence[str] = ()
        self._refused: tuple[PythonCommand, Mapping[str, str]] | None = None  # the program that could not be preloaded
        self.obstacle = ""  # why workers of a Python program are not forked

    def prepare(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start to import what the workers need, if they can be forked. Call it in the main thread."""
        self.obstacle = ""
        program = self._forkable(command, environment)
        if not program:
            self.close()  # it belongs to another command
            return
        self._command = program.program
        if not self._preloaded or not self._preloaded.fits(program, environment):
            self.close()
            self._preloaded = Preloaded(program, environment)

    def _forkable(self, command: Sequence[str], environment: Mapping[str, str]) -> PythonCommand | None:
        """Return the program whose workers are to be forked; None if each starts its own interpreter."""
        try:
            program = python_command(command, environment)
        except NotForkedError:
            return None
        is_refused = self._refused and program.starts_like(self._refused[0]) and environment == self._refused[1]
        return None if is_refused else program

    def wait(self) -> None:
        """Wait until the imports are done."""
        if self._preloaded and (obstacle := self._preloaded.wait()):
            self._refused = self._preloaded.program, self._preloaded.environment
            self._give_up(obstacle)

    @property
    def pids(self) -> list[int]:
        """The processes that stay alive between two generations of the workers."""
        return [self._preloaded.pid] if self._preloaded else []

    def printed(self) -> str:
        """Return what the imports have printed since the last call."""
        return self._preloaded.complaint() if self._preloaded else ""

    def fork(
        self,
        environments: Sequence[Mapping[str, str]],
        folder: str,
        bind: str,
        streams: Sequence[Streams],
        store: HostStore | None = None,
    ) -> list[Child]:
        """Fork a worker for each environment, and then a process that serves their store, if `store` is given.

        Returns:
            The processes that could be forked, in this order. The caller starts the others as new interpreters.
        """
        if not self._preloaded:
            return []
        common = {"kind": "worker", "command": self._command, "folder": folder, "bind": bind}
        orders: list[Order] = [
            ({**common, "environment": dict(environment)}, pair)
            for environment, pair in zip(environments, streams, strict=True)
        ]
        if store:
            orders.append(({"kind": "store", "address": store.address, "port": store.port}, (store.descriptor,)))
        children: list[Child] = []
        try:
            for first in range(0, len(orders), MAX_AT_ONCE):
                children += self._preloaded.fork(orders[first : first + MAX_AT_ONCE])
        except NotForkedError as error:
            self._give_up(str(error))
        return children

    def _give_up(self, obstacle: str) -> None:
        self.obstacle = obstacle
        self.close()

    def close(self) -> None:
        """End the preloaded process."""
        if self._preloaded:
            self._preloaded.end()
        self._preloaded = None


def start(command: Sequence[str], environment: Mapping[str, str], bind: str, streams: Streams) -> Child:
    """Start a worker as a new process. Call it in the main thread: Linux ends the worker with the thread."""
    return subprocess.Popen(
        parent_death.command(command, bind=bind),
        stdin=streams[1] if os.isatty(streams[1]) else subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env=dict(environment),
        start_new_session=True,
    )


def open_streams(workers: int, stdout: int, both: bool) -> tuple[list[Streams], list[list[tuple[str, int]]]]:
    """Return each worker's descriptors of stdout and stderr, and those to read from, with their names.

    Args:
        stdout: A descriptor to which workers write directly, or -1.
        both: They also write stderr to it.
    """
    streams, readers = list[Streams](), list[list[tuple[str, int]]]()
    for _ in range(workers):
        writers, own = [], []
        for name in ("stdout", "stderr"):
            if stdout >= 0 and (both or name == "stdout"):
                writers.append(os.dup(stdout))
                continue
            reader, writer = os.pipe()
            own.append((name, reader))
            writers.append(writer)
        streams.append((writers[0], writers[1]))
        readers.append(own)
    return streams, readers


def signal_group(child: Child, number: signal.Signals) -> None:
    """Send a signal to a worker and to the processes that it started in its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
