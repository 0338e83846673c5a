"""A Spark task: it connects to the driver, and starts workers when it is told to, one after the other."""

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
from lockstep.integrations.spark.wire import (
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
    """Do what the driver says until it says that the task is over, or is gone.

    Args:
        index: Of the task's partition.
        address: Where the driver listens, and `key` what opens the connection.
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
                if worker and worker.has_ended():
                    worker = None
        except (EOFError, OSError):  # the driver is gone, which Spark will notice, too
            return
        finally:
            if worker:
                worker.kill()


def _start(order: StartWorker, link: _Link) -> _Worker | None:
    """Start a worker. An error, such as that of a full disk, is reported as the worker's."""
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
    """The connection, as several threads use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._last = time.monotonic()

    def send(self, message: Any) -> None:
        with self._lock:
            self._connection.send(message)
            self._last = time.monotonic()

    def beat(self) -> None:
        """Send a sign of life where there was nothing else to say."""
        if time.monotonic() - self._last > Timings().heartbeat:
            self.send(TaskAlive())


class _Worker:
    """A worker's process, in a folder of its own, through which the call and the result go."""

    def __init__(self, order: StartWorker, link: _Link) -> None:
        self._link = link
        self._folder = TemporaryDirectory(prefix="lockstep-spark-")
        path = Path(self._folder.name)
        (path / function_worker.CALL).write_bytes(order.call)
        own = own_gpu_variables(_gpus(), order.variables)
        words = [order.executable or sys.executable, function_worker.__file__, self._folder.name]
        search = os.pathsep.join(place for place in sys.path if place)  # with what Spark has brought here
        self._process = subprocess.Popen(
            parent_death.command(words),
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

    def has_ended(self) -> bool:
        """Whether it has; its last words and its result are then sent, once."""
        code = self._process.poll()
        if code is None:
            return False
        self.signal(signal.SIGKILL)  # what it has left behind
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
