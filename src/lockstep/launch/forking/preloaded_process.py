"""The preloaded process: imports what a host's workers need, once, and forks them.

The node process starts it with the workers' environment, interpreter and flags, as `Preloaded`. They exchange messages
over a socket: 8 bytes with the length of the JSON that follows, sent with the descriptors of the workers' streams.

An intermediate process forks the workers and exits, so that the node process adopts them. They are then like its own
children: it reaps them, and they die with it. The preloaded process, which begins in `main`, uses no device, creates no
process group, and has no Python thread.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from lockstep.diagnosis import OBSERVE
from lockstep.files.staged import STAGED
from lockstep.launch.forking.python_command import NotForkedError, PythonCommand
from lockstep.launch.node.hardware import bind_worker
from lockstep.launch.node.processes import end_with_parent
from lockstep.world import STARTED, accelerator

RECORD = struct.Struct("=qq")  # a process's number and pid
# The folders of a staged environment are replaced by their copies before other modules are imported.
PROGRAM = f"""import json, os, sys
sys.flags.safe_path or sys.path.pop(0)
for source, copy in json.loads(os.environ.get("{STAGED}") or "{{}}").items():
    paths = [(p, os.path.abspath(p)) for p in sys.path]
    sys.path = [copy + a[len(source):] if (a + "/").startswith(source + "/") else p for p, a in paths]
from lockstep.launch.forking.preloaded_process import main; main()"""
# Variables that may differ from one generation to the next, and that nothing reads before the fork: forked workers set
# their threads themselves.
OF_A_GENERATION = ("OMP_NUM_THREADS", STARTED)
LENGTH_BYTES = 8
MAX_DESCRIPTORS = 253  # per message (SCM_MAX_FD, man 7 unix)
MAX_AT_ONCE = MAX_DESCRIPTORS // 2
NO_TORCH = 70  # exit code of a process that was to serve the store
CHUNK_BYTES, PRINTED_BYTES = 1 << 16, 1 << 14
END_SECONDS = 5.0
Order = tuple[Mapping[str, Any], Sequence[int]]  # the description of a process, and its descriptors


def send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send one message."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(LENGTH_BYTES, "big")], descriptors)
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors; None at the end of the stream."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MAX_DESCRIPTORS)
    if len(head) < LENGTH_BYTES:
        return None, descriptors
    body = b""
    while len(body) < (length := int.from_bytes(head, "big")):
        chunk = connection.recv(min(length - len(body), 1 << 20))
        if not chunk:
            return None, descriptors
        body += chunk
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


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


def main() -> None:
    """Serve the node process until it exits; in a forked process, run the worker. `sys.argv`: socket, parent's pid."""
    from lockstep.launch.forking import forked_worker  # 15 ms, which the node process does not need

    connection, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)
    first, _ = receive(connection)
    if first is None:
        os._exit(0)
    forked_worker.show_as(["lockstep: preloaded for workers"])
    sys.argv = first["arguments"]  # the workers' arguments
    try:
        loaded = forked_worker.load(first["modules"])
        obstacle = _obstacle()
    except Exception as error:
        obstacle = f"{first['modules'][0]} cannot be preloaded ({type(error).__name__}: {error})"
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # otherwise each worker would write the buffer
    send(connection, {"obstacle": obstacle})
    if obstacle:
        os._exit(0)
    order = _serve(connection, parent)
    forked_worker.run(order["command"], order["environment"], order["folder"], loaded)


def _obstacle() -> str:
    """Return why this process must not fork after its imports, or ""."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        return f"an import started the thread {others[0]}"
    if not accelerator.outlives_fork():
        return "torch for XPU is not known to work after a fork"
    return ""


def _serve(connection: socket.socket, parent: int) -> dict[str, Any]:
    """Fork the processes of each message. Return only in a worker, with its order."""
    while True:
        orders, descriptors = receive(connection)
        if orders is None:
            os._exit(0)
        number, pids = _fork(len(orders["processes"]))
        if number is not None:
            connection.close()
            order: dict[str, Any] = orders["processes"][number]
            _begin(order, descriptors, parent)
            return order
        send(connection, {"pids": pids})
        for each in descriptors:
            os.close(each)


def _fork(count: int) -> tuple[int | None, list[int]]:
    """Fork processes that are not children of this process.

    Returns:
        In this process, None and the pids, which are empty if the system's limit is reached. In each new process, its
        number, once the node process has adopted it.
    """
    reading, writing = os.pipe()
    adopted, adopt = os.pipe()
    between = _fork_once()
    if between == 0:
        number = next((number for number in range(count) if _fork_once() == 0), None)
        if number is None:
            os._exit(0)
        os.setsid()  # before the pid is known elsewhere, so that a signal to the session reaches this process
        os.write(writing, RECORD.pack(number, os.getpid()))
        for each in (reading, writing, adopt):
            os.close(each)
        if not os.read(adopted, 1):  # the fork failed for another process
            os._exit(1)
        os.close(adopted)
        return number, []
    os.close(writing)
    os.close(adopted)
    pids = dict(RECORD.unpack(record) for record in iter(lambda: os.read(reading, RECORD.size), b""))
    if between:
        os.waitpid(between, 0)
    if len(pids) < count:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        pids.clear()
    else:
        os.write(adopt, bytes(count))
    os.close(reading)
    os.close(adopt)
    return None, [pids[number] for number in sorted(pids)]


def _fork_once() -> int | None:
    """Call os.fork; return None if the system's limit for processes is reached."""
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads. There is no Python thread; OpenBLAS stops its threads before a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return os.fork()
        except OSError:
            return None


def _begin(order: Mapping[str, Any], descriptors: Sequence[int], parent: int) -> None:
    """Set up a forked process like a child of the node process: streams, CPU binding, parent-death signal."""
    if not end_with_parent(parent, signal.SIGKILL):
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    own = [descriptors[index] for index in order["descriptors"]]
    serves = order["kind"] == "store"
    stdin = nothing if serves or not os.isatty(own[1]) else own[1]
    for number, descriptor in enumerate((nothing, nothing, nothing) if serves else (stdin, *own)):
        os.dup2(descriptor, number)
    for each in {nothing, *descriptors}.difference(own if serves else ()):
        os.close(each)
    if serves:
        serve_store(own[0], order["address"], order["port"])
    bind_worker(order["bind"], order["environment"])


def serve_store(listener: int, address: str, port: int) -> NoReturn:
    """Serve the job's store, torch's TCPStore, on a listening socket until this process is killed.

    The first host's node process opens the socket. This process is forked together with the workers. If each worker
    starts its own interpreter, it is started at the first connection, so that a job without torch does not import it.
    """
    from lockstep.launch.forking.forked_worker import show_as

    show_as(["lockstep: the job's store"])
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":  # which the workers have: they connect
            raise SystemExit(NO_TORCH) from None
        store = None  # a torch without TCPStore, whose workers use no store
    else:
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while True:
        signal.pause()
        assert store or listener  # keeps the references: both are served while they are referenced
