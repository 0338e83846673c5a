"""A Spark task: connects to the driver, and starts one worker at a time on request."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from lockstep.integrations.seats import own_gpu_variables
from lockstep.integrations.spark.messages import (
    SignalWorker,
    StartWorker,
    TaskAlive,
    TaskHello,
    TaskOver,
    WorkerEnded,
    WorkerLines,
)
from lockstep.launch.node import function_worker, parent_death
from lockstep.launch.output import line_splitter
from lockstep.launch.output.display import Name
from lockstep.launch.plan.job_plan import handed_on
from lockstep.launch.plan.timings import Timings

CHUNK_BYTES = 1 << 16
POLL_SECONDS = 0.05


def serve(index: int, address: tuple[str, int], key: bytes) -> None:
    """Handle the driver's messages until the driver ends the task or disconnects.

    Args:
        index: The index of the task's partition.
        address: The driver's host and port.
        key: The key that authenticates the connection.
    """
    with Client(address, authkey=key) as connection:
        link = _Link(connection)
        link.send(TaskHello(index, socket.gethostname(), _gpus()))
        worker: _Worker | None = None
        try:
            while True:
                link.beat()
                message = connection.recv() if connection.poll(POLL_SECONDS) else None
                match message:
                    case StartWorker():
                        worker = _start(message, link)
                    case SignalWorker(number) if worker:
                        worker.signal(signal.Signals(number))
                    case TaskOver():
                        return
                if worker and worker.has_exited():
                    worker = None
        except (EOFError, OSError):  # the driver disconnected; Spark handles that
            return
        finally:
            if worker:
                worker.kill()


def _start(order: StartWorker, link: _Link) -> _Worker | None:
    """Start a worker. Report an error, such as a full disk, as the worker's failure."""
    try:
        return _Worker(order, link)
    except Exception as error:
        text = f"cannot start a worker on {socket.gethostname()}: {error}"
        report = pickle.dumps((time.time_ns(), int(order.variables["HOROVOD_RANK"]), text))
        link.send(WorkerEnded(1, {f"{function_worker.ERROR}{os.getpid()}": report}))
        return None


def _gpus() -> tuple[str, ...]:
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = context.resources() if context else {}
    return tuple(resources["gpu"].addresses) if "gpu" in resources else ()


class _Link:
    """A thread-safe connection with heartbeats."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)
            self._last = time.monotonic()

    def beat(self) -> None:
        """Send a heartbeat if nothing else was sent recently."""
        if time.monotonic() - self._last > Timings().heartbeat:
            self.send(TaskAlive())


class _Worker:
    """A worker's process, with a temporary folder for its call and its result."""

    def __init__(self, order: StartWorker, link: _Link) -> None:
        self._link = link
        self._folder = TemporaryDirectory(prefix="lockstep-spark-")
        path = Path(self._folder.name)
        (path / function_worker.CALL).write_bytes(order.call)
        own = own_gpu_variables(_gpus(), order.variables)
        arguments = [order.executable or sys.executable, function_worker.__file__, self._folder.name]
        search = os.pathsep.join(path for path in sys.path if path)  # including files that Spark distributed
        self._process = subprocess.Popen(
            parent_death.command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**handed_on(os.environ), "PYTHONPATH": search, **order.variables, **own},
            start_new_session=True,
        )
        assert self._process.stdout
        assert self._process.stderr
        self._readers = [
            threading.Thread(target=self._carry, args=("stdout", self._process.stdout), daemon=True),
            threading.Thread(target=self._carry, args=("stderr", self._process.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def has_exited(self) -> bool:
        """Return whether the worker has exited; if so, send its remaining output and its result (call only once)."""
        code = self._process.poll()
        if code is None:
            return False
        self.signal(signal.SIGKILL)  # its descendants
        deadline = time.monotonic() + Timings().output
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        left = [*Path(self._folder.name).glob(f"{function_worker.RESULT}*")]
        left += Path(self._folder.name).glob(f"{function_worker.ERROR}*")
        self._link.send(WorkerEnded(code, {file.name: file.read_bytes() for file in left}))
        self._folder.cleanup()
        return True

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _carry(self, name: Name, stream: IO[bytes]) -> None:
        lines = line_splitter.Lines()
        with suppress(OSError), stream:
            while chunk := os.read(stream.fileno(), CHUNK_BYTES):
                if whole := lines.feed(chunk):
                    self._link.send(WorkerLines(name, tuple(whole)))
            if rest := lines.rest():
                self._link.send(WorkerLines(name, tuple(rest)))
