"""Start a host's workers: forked from a preloaded process if that is safe, each as a new interpreter otherwise.

Either way a worker is a child of this process, leads its own session, ends when this process does, and has no stdin
unless its stderr is a terminal, which it then reads, too.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from lockstep.diagnosis import OBSERVE
from lockstep.files.staged import STAGED
from lockstep.launch.forking.orders import MAX_DESCRIPTORS, receive, send
from lockstep.launch.forking.python_command import NotForkedError, PythonCommand, python_command
from lockstep.launch.node import parent_death
from lockstep.launch.node.processes import adopt_orphans
from lockstep.world import STARTED

# The folders of a staged environment are replaced by their copies before other modules are imported.
PROGRAM = f"""import json, os, sys
sys.flags.safe_path or sys.path.pop(0)
for source, copy in json.loads(os.environ.get("{STAGED}") or "{{}}").items():
    paths = [(p, os.path.abspath(p)) for p in sys.path]
    sys.path = [copy + a[len(source):] if (a + "/").startswith(source + "/") else p for p, a in paths]
from lockstep.launch.forking.preloaded_process import main; main()"""
# Variables that may differ from one generation to the next, and that nothing reads before the fork: forked workers set
# their threads themselves, and a job that has lost its other hosts goes on over the loopback interface.
OF_A_GENERATION = (
    *("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "HOROVOD_HOSTNAME"),
    STARTED,
)
CHUNK_BYTES, PRINTED_BYTES = 1 << 16, 1 << 14
END_SECONDS = 5.0
MAX_AT_ONCE = MAX_DESCRIPTORS // 2
Streams = tuple[int, int]  # the descriptors of stdout and stderr
Order = tuple[Mapping[str, Any], Sequence[int]]  # the description of a process, and its descriptors


class Store(NamedTuple):
    """The address of the workers' store, and the descriptor of its listening socket."""

    listener: int
    address: str
    port: int


class Child(Protocol):
    """A process that this one started or adopted."""

    pid: int

    def poll(self) -> int | None:
        """Return its exit code, or -N if signal N ended it; None while it runs."""


class Adopted:
    """A child that was forked by another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # killed and reaped with all descendants
                pid, status = self.pid, int(signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Preloaded:
    """The preloaded process, controlled from its parent.

    Create it in the main thread: Linux ends it with the thread that started it.
    """

    def __init__(self, program: PythonCommand, environment: Mapping[str, str]) -> None:
        self.program = program
        self.environment = dict(environment)
        self._printed = b""
        self._obstacle: str | None = None
        self._asked = threading.Lock()  # held while waiting for its answer
        self._waiting = threading.Lock()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [program.interpreter, *program.flags, "-c", PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # like the workers' streams: Python remembers the kind of a stream
                stderr=subprocess.STDOUT,
                env={**self.environment, OBSERVE: ""},  # only its workers are observed
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        with suppress(OSError):
            send(self._connection, {"modules": program.modules, "arguments": program.arguments})

    @property
    def pid(self) -> int:
        return self._process.pid

    def fits(self, program: PythonCommand, environment: Mapping[str, str]) -> bool:
        """Whether workers of this program and environment can be forked from it."""
        mine, other = (
            {name: each[name] for name in each if name not in OF_A_GENERATION}
            for each in (self.environment, environment)
        )
        same = program.starts_like(self.program) and mine == other
        return same and self._process.poll() is None and not self._obstacle

    def wait(self) -> str:
        """Wait until everything is imported. Return why it cannot fork, or ""."""
        with self._waiting:  # a thread of an earlier generation may still wait
            if self._obstacle is None:
                self._obstacle = self._answer().get("obstacle", "")
            return self._obstacle

    def fork(self, orders: Sequence[Order]) -> list[Adopted]:
        """Fork processes, at most MAX_AT_ONCE.

        Raises:
            NotForkedError: They cannot be forked.
        """
        descriptors: list[int] = []
        processes = []
        for order, own in orders:
            processes.append({**order, "descriptors": [*range(len(descriptors), len(descriptors) + len(own))]})
            descriptors += own
        try:
            send(self._connection, {"processes": processes}, descriptors)
        except OSError as error:
            raise NotForkedError(f"the preloaded process is gone ({error.strerror})") from None
        answer = self._answer()
        if not answer.get("pids"):
            raise NotForkedError(answer.get("obstacle", "the system's limit for processes is reached"))
        return [Adopted(pid) for pid in answer["pids"]]

    def end(self) -> None:
        """End it, but not its workers. Another thread that waits for its answer gets none."""
        self._kill()
        with suppress(OSError):  # it may have exited already
            self._connection.shutdown(socket.SHUT_RDWR)  # a forked process may hold the other end
        with self._asked:  # closing a descriptor does not wake a thread that waits for it
            self._connection.close()
            if self._process.stdout:
                self._process.stdout.close()

    def _kill(self) -> int | None:
        """Kill it. Return its exit code, or None if it cannot exit yet, such as when it waits for a file system."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return self._process.returncode

    def _answer(self) -> dict[str, Any]:
        answer = None
        with self._asked, suppress(OSError, ValueError):  # it may have exited
            self._hear()
            answer, _ = receive(self._connection)
        if answer is None:
            code = self._kill()
            return {"obstacle": f"the preloaded process exited with code {code}: {self.complaint()}"}
        return answer

    def _hear(self, until_answered: bool = True) -> None:
        """Drain its output, keeping the end, until it answers or exits: a full pipe would block it."""
        stream = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if stream and not stream.closed:
                selector.register(stream, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(None if until_answered else 0)}
                if stream in ready and stream:
                    chunk = os.read(stream.fileno(), CHUNK_BYTES)
                    self._printed = (self._printed + chunk)[-PRINTED_BYTES:]
                    if not chunk:
                        selector.unregister(stream)
                if self._connection in ready or not ready:
                    return

    def complaint(self) -> str:
        """Return the end of what it has printed since the last call."""
        with suppress(OSError, ValueError):  # it may have exited
            self._hear(until_answered=False)
        printed, self._printed = self._printed, b""
        return printed.decode(errors="replace").strip()


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
        store: Store | None = None,
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
            orders.append(({"kind": "store", "address": store.address, "port": store.port}, (store.listener,)))
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


def start_store(store: Store) -> Child:
    """Start a process that serves the workers' store. Call it in the main thread."""
    code = f"from lockstep.launch.forking.preloaded_process import serve_store; serve_store(*{tuple(store)})"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.Popen(
        parent_death.command(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[store.listener],
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
