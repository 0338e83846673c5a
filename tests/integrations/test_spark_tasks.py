"""The driver and the tasks of horovod.spark, connected to each other without Spark."""

from __future__ import annotations

import io
import pickle
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from lockstep.integrations.spark import task
from lockstep.integrations.spark.messages import StartWorker, TaskHello, TaskOver
from lockstep.integrations.spark.run import _Show
from lockstep.integrations.spark.task_server import TaskServer
from lockstep.world.store import LOOPBACK

KEY = b"key"
SECONDS = 60


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_that_cannot_be_started_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with TaskServer(LOOPBACK, KEY, lambda *lines: None, tmp_path) as server:
        thread = threading.Thread(target=task.serve, args=(0, (LOOPBACK, server.port), KEY), daemon=True)
        thread.start()
        wait_for(lambda: server.tasks)
        worker = server.tasks[0].start(3, StartWorker({"HOROVOD_RANK": "3"}, b"", None))
        wait_for(lambda: worker.poll() is not None)
        assert worker.poll() == "failed with exit code 1"
        assert server.tasks[0].is_idle
    (file,) = tmp_path.glob("error.*")
    _, rank, text = pickle.loads(file.read_bytes())
    assert rank == 3
    assert text.startswith(f"cannot start a worker on {socket.gethostname()}: [Errno 2] No such file or directory")
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_task_that_connects_while_the_driver_ends_is_told_to_end(tmp_path: Path) -> None:
    with TaskServer(LOOPBACK, KEY, lambda *lines: None, tmp_path) as server:
        connection = Connection(socket.create_connection((LOOPBACK, server.port)).detach())
        assert connection.poll(SECONDS)  # the driver's challenge
    with connection:
        answer_challenge(connection, KEY)
        deliver_challenge(connection, KEY)
        connection.send(TaskHello(0, "host", ()))
        assert connection.poll(SECONDS)
        assert connection.recv() == TaskOver()


def test_a_stream_that_cannot_be_written_to_is_reported_and_harms_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    closed = io.StringIO()
    closed.close()
    _Show(1, False, closed, None)(0, "stdout", [b"line\n"])
    assert "cannot print the stdout of worker 0: I/O operation on closed file" in caplog.text
