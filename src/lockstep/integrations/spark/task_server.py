"""The driver's side: the connected Spark tasks and their workers."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from lockstep.integrations.spark.messages import (
    SignalWorker,
    StartWorker,
    TaskAlive,
    TaskHello,
    TaskOver,
    WorkerEnded,
    WorkerLines,
)
from lockstep.launch.node import function_worker
from lockstep.launch.output.display import Name
from lockstep.launch.plan.timings import Timings

Show = Callable[[int, Name, tuple[bytes, ...]], None]


class TaskWorker:
    """A worker in a task; `rank` is the prefix of its output."""

    def __init__(self, task: SparkTask, rank: int) -> None:
        self._task = task
        self.rank = rank
        self.ended: WorkerEnded | None = None

    def poll(self) -> str | None:
        if self.ended is None:
            return "failed because its Spark task disconnected" if self._task.disconnected else None
        code = self.ended.code
        return "" if not code else f"was killed by {_name(-code)}" if code < 0 else f"failed with exit code {code}"

    def end(self, number: signal.Signals) -> None:
        if self.ended is None:
            self._task.send(SignalWorker(number))

    def take_rank(self, rank: int) -> None:
        self.rank = rank


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class SparkTask:
    """A connected task, with at most one running worker."""

    def __init__(self, connection: Connection, hello: TaskHello) -> None:
        self.index = hello.index
        self.host = hello.host
        self.gpus = hello.gpus
        self.worker: TaskWorker | None = None
        self.disconnected = False
        self._connection = connection
        self._lock = threading.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether a worker can be started in the task."""
        return not self.disconnected and (self.worker is None or self.worker.ended is not None)

    def start(self, rank: int, order: StartWorker) -> TaskWorker:
        """Start a worker. Do not call its `end` before this returns."""
        self.worker = TaskWorker(self, rank)
        self.send(order)
        return self.worker

    def send(self, message: Any) -> None:
        """Send the task a message; ignored if it has disconnected."""
        with self._lock, suppress(OSError):
            self._connection.send(message)


class TaskServer:
    """Listens for tasks during a `with` block.

    Args:
        address: The address to listen on, with a free port.
        key: The key that authenticates connections.
        show: Called with a worker's rank, the stream's name and its lines, from several threads.
        folder: For the workers' result and error files.
    """

    def __init__(self, address: str, key: bytes, show: Show, folder: Path) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._key = key
        self._show = show
        self._folder = folder
        self._connected: list[SparkTask] = []
        self._over = False

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def tasks(self) -> list[SparkTask]:
        """The connected tasks, by partition."""
        return sorted((task for task in self._connected if not task.disconnected), key=lambda task: task.index)

    def __enter__(self) -> TaskServer:
        threading.Thread(target=self._listen, name="lockstep-spark", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # interrupts accept()
        self._listener.close()
        self._over = True
        for task in self.tasks:
            task.send(TaskOver())

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(Connection(connection.detach()),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Authenticate one connection, and handle its messages until it closes."""
        task = None
        with connection, suppress(EOFError, OSError, AuthenticationError):
            try:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                task = SparkTask(connection, connection.recv())
                self._connected.append(task)
                if self._over:  # it connected after TaskOver was sent to the others
                    task.send(TaskOver())
                while connection.poll(Timings().silence):
                    self._take(task, connection.recv())
            finally:
                if task:
                    task.disconnected = True

    def _take(self, task: SparkTask, message: Any) -> None:
        worker = task.worker
        match message:
            case TaskAlive():
                pass
            case WorkerLines(name, lines) if worker:
                self._show(worker.rank, name, lines)
            case WorkerEnded(_, files) if worker:
                for file, content in files.items():
                    ending = f".{task.index}" if file.startswith(function_worker.ERROR) else ""
                    (self._folder / f"{Path(file).name}{ending}").write_bytes(content)
                worker.ended = message
