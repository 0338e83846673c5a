"""Phases that take longer than --hang-timeout are no hang while a worker does something, or is suspended or debugged.

`docs/explanation/reliability.md` lists the results of the long form.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, Done, Job, own_environment, run, started
from time_limits import scaled

SUPPORT = Path(__file__).parents[1] / "support"
TRAIN = ["--model", "slow_work:net", "-b", "4", "--epochs", "1", "-j", "1", "--device", "cpu", "--run-dir", "run"]


def command(work: str, limit: float, seconds: float) -> list[str]:
    flags = ["-np", "2", "--hang-timeout", str(limit)]
    return [*LOCKSTEP, "run", *flags, "--", sys.executable, str(SUPPORT / "slow_work.py"), work, str(seconds)]


def assert_no_alarm(code: int, text: str) -> None:
    assert code == 0, text
    assert "lockstep: rank" not in text
    assert "lockstep: no rank" not in text
    assert "lockstep: all ranks" not in text


def assert_calm(done: Done) -> None:
    assert_no_alarm(done.returncode, done.stdout + done.stderr)


@contextmanager
def slow_pipes(folder: Path) -> Iterator[None]:
    """Write 200 kB a second to the named pipe `source`, and read from `sink`, during the block."""
    descriptors = []
    for name in ("source", "sink"):
        os.mkfifo(folder / name)
        descriptors.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK))
    source, sink = descriptors
    ended = threading.Event()

    def feed() -> None:
        while not ended.wait(0.1):
            with suppress(BlockingIOError):
                os.write(source, bytes(20_000))
            with suppress(BlockingIOError):
                os.read(sink, 1 << 20)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(source)
        os.close(sink)


SHORT = [("child", 3, 6)]
LONG = [
    ("evaluation", 12, 40),
    *((work, 5, 15) for work in ("child", "checkpoint", "checkpoint thread", "remote checkpoint", "cold cache")),
    *((work, 5, 15) for work in ("inductor", "compile everywhere", "backend")),
]


@pytest.mark.parametrize(
    ("work", "limit", "seconds"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_slow_work_is_not_a_hang(tmp_path: Path, work: str, limit: float, seconds: float) -> None:
    environment = own_environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    with slow_pipes(tmp_path):
        assert_calm(run(command(work, scaled(limit), scaled(seconds)), tmp_path, environment))


@pytest.mark.long
@pytest.mark.parametrize("data", ["cold", "slowly_saved", "quick"])
def test_slow_phases_of_training_are_no_hang(tmp_path: Path, data: str) -> None:
    variables = {"SLOW_EVALUATION": "1"} if data == "quick" else {}
    environment = own_environment(PYTHONPATH=f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}", **variables)
    flags = ["-np", "2", "--hang-timeout", "3", "--data", f"slow_work:{data}", "--lr", "0.01", *TRAIN]
    with slow_pipes(tmp_path):
        done = run([*LOCKSTEP, "train", *flags], tmp_path, environment)
    assert_calm(done)
    if data == "quick":
        assert done.stdout.count("evaluating") >= 2 * 8  # each takes a second


@pytest.mark.long
@pytest.mark.parametrize(("limit", "seconds"), [(10, 4), (30, 20)])
def test_briefly_suspended_worker_is_not_a_hang(tmp_path: Path, limit: float, seconds: float) -> None:
    with started(command("steps", limit, 4), tmp_path) as job:
        worker = _worker(job, 1)
        worker.suspend()
        time.sleep(seconds)
        worker.resume()
        assert_no_alarm(job.wait(), job.text)


@pytest.mark.long
@pytest.mark.parametrize("first", ["launcher", "workers"])
def test_job_suspended_with_its_launcher_is_not_a_hang(tmp_path: Path, first: str) -> None:
    with started(command("steps", 4, 4), tmp_path) as job:
        _worker(job, 1)
        processes: list[psutil.Process] = [job, *job.descendants()]
        for process in processes:
            process.suspend()
        time.sleep(12)
        for process in processes if first == "launcher" else reversed(processes):
            process.resume()
            time.sleep(0.2)
        assert_no_alarm(job.wait(), job.text)


@pytest.mark.parametrize("seconds", [5, pytest.param(15, marks=pytest.mark.long)])
def test_worker_in_pdb_is_not_a_hang(tmp_path: Path, seconds: float) -> None:
    os.mkfifo(tmp_path / "answers")
    answers = os.open(tmp_path / "answers", os.O_RDWR)
    with started(command("debugger", scaled(3), 0), tmp_path) as job:
        job.wait_for("debugging")
        time.sleep(scaled(seconds))
        os.write(answers, b"continue\n")
        os.close(answers)
        assert_no_alarm(job.wait(), job.text)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("gdb"), reason="needs gdb")
def test_worker_in_gdb_is_not_a_hang(tmp_path: Path) -> None:
    with started(command("steps", 3, 8), tmp_path) as job:
        worker = _worker(job, 1)
        gdb = ["gdb", "-batch", "-p", str(worker.pid), "-ex", "shell sleep 9", "-ex", "detach"]
        subprocess.run(gdb, check=True, capture_output=True, timeout=100)
        assert_no_alarm(job.wait(), job.text)


def _worker(job: Job, rank: int) -> psutil.Process:
    """The worker of a rank, once both have joined."""
    workers = job.wait_until(lambda: len(found := job.workers()) == 2 and found)
    job.wait_until(lambda: "stepping" in job.text)
    return next(worker for worker in workers if worker.environ()["RANK"] == str(rank))
