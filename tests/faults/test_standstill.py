"""Clocks that jump, and processes that stand still for a while."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, own_environment, run, started
from disturbed_run import train
from hosts import Bed
from runs import final_weights, losses
from ssh_job import Job
from worker_group import run_in_workers

from lockstep.files.jsonl import read_records
from lockstep.world.world import World

HOUR = 3600.0
# Each look at the clock of this process shows 1,000 s less than the one before.
BACKWARDS = """
import itertools, time
real, looks = time.time, itertools.count()
time.time = lambda: real() - 1000 * next(looks)
"""
WORKER = """
import os, time
from contextlib import suppress
from pathlib import Path

rank, first = int(os.environ["RANK"]), Path("first")
if rank == 0:
    Path("draft").write_text(str(os.getpid()))
    Path("draft").rename(first)
else:
    while not first.exists():
        time.sleep(0.01)
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, and is buried
        while Path("/proc", first.read_text(), "stat").read_text().rpartition(") ")[2][0] != "Z":
            time.sleep(0.01)
raise ValueError(f"worker {rank} fails")
"""


def _train(world: World, path: Path, disturb: Callable[[World, float], object], seconds: float) -> None:
    """Train, and disturb this worker before its fourth step."""
    settings = {"epochs": 2, "global_batch_size": 60, "batch_size": None, "time_limit": "0:55"}
    train(path, {4: lambda: disturb(world, seconds)}, world, **settings)


def _jump(world: World, seconds: float) -> None:
    """Let this process's wall clock jump, in one worker forth and in the other back."""
    real, jump = time.time, seconds * (1 if world.rank == 0 else -1)
    time.time = lambda: real() + jump


def test_diverging_clocks_do_not_change_training_on_two_workers(tmp_path: Path) -> None:
    run_in_workers(2, _train, tmp_path / "whole", _jump, 0.0)
    for name, jump in (("forth", HOUR), ("back", -HOUR)):
        path = tmp_path / name
        run_in_workers(2, _train, path, _jump, jump)
        assert final_weights(path) == final_weights(tmp_path / "whole")
        assert losses(path) == losses(tmp_path / "whole")
        records = [record for record in read_records(path / "metrics.jsonl") if "images_per_second" in record]
        times = [record["time_seconds"] for record in records]
        assert times == sorted(times)
        assert 0 < times[-1] < HOUR / 2
        assert all(record["images_per_second"] > 1 for record in records)
        assert all(0 < record["epoch_seconds"] < HOUR / 2 for record in records if record["kind"] == "epoch")
        unix_times = [record["unix_time"] for record in records]
        assert abs(unix_times[-1] - unix_times[0] - jump) < HOUR / 2  # the clock did jump, and records show it


@pytest.mark.cold
def test_first_failure_is_named_though_the_clock_runs_backwards(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BACKWARDS)
    (tmp_path / "worker.py").write_text(WORKER)
    environment = own_environment(PYTHONPATH=f"{tmp_path}:{own_environment().get('PYTHONPATH', '')}")
    command = [*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "worker.py"]
    done = run(command, tmp_path, environment, cold=True)
    assert done.returncode == 1
    assert "lockstep: worker 0 of 2 failed with exit code 1" in done.stderr


def _stand_still(world: World, seconds: float) -> None:
    """Stop worker 1, all its threads included, until a child of it lets it go on."""
    if world.rank != 1 or not seconds:
        return
    child = multiprocessing.get_context("fork").Process(target=_wake, args=(os.getpid(), seconds))
    child.start()
    os.kill(os.getpid(), signal.SIGSTOP)
    child.kill()
    child.join()


def _wake(pid: int, seconds: float) -> None:
    time.sleep(seconds)
    while True:  # it may not even have stopped yet
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)


@pytest.mark.parametrize("seconds", [1.0, pytest.param(20.0, marks=pytest.mark.long)])
def test_a_worker_that_stands_still_is_waited_for(tmp_path: Path, seconds: float) -> None:
    run_in_workers(2, _train, tmp_path / "whole", _stand_still, 0.0)
    start = time.monotonic()
    run_in_workers(2, _train, tmp_path / "slow", _stand_still, seconds)
    assert time.monotonic() - start > seconds
    assert final_weights(tmp_path / "slow") == final_weights(tmp_path / "whole")
    assert losses(tmp_path / "slow") == losses(tmp_path / "whole")
    rates = [r["images_per_second"] for r in read_records(tmp_path / "slow" / "metrics.jsonl") if r["kind"] == "step"]
    assert min(rates) < 60 / seconds  # the wait is seen where it was


# Each worker writes more than a pipe holds, after it has seen the file.
SUSPENDED_WORKER = 'echo here; until [ -e "$0" ]; do sleep 0.1; done; seq 1 20000; echo done'


NODE = "lockstep.launch.node"


def _parts(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """The launcher of a job on this machine, its node process, and the guard above that."""
    (guard,) = launcher.children()
    (node,) = guard.children()
    assert NODE in guard.cmdline()
    assert NODE in node.cmdline()
    return {"launcher": launcher, "node": node, "guard": guard}


@pytest.mark.parametrize(
    ("names", "seconds"),
    [
        (("launcher", "node", "guard"), 1.0),
        *(pytest.param((name,), 20.0, marks=pytest.mark.long) for name in ("launcher", "node", "guard")),
    ],
)
def test_suspended_process_continues_afterwards_on_one_machine(
    tmp_path: Path, names: tuple[str, ...], seconds: float
) -> None:
    go = tmp_path / "go"
    with started([*LOCKSTEP, "run", "-np", "2", "--", "sh", "-c", SUSPENDED_WORKER, go], tmp_path) as job:
        job.wait_until(lambda: job.text.count("here") == 2)
        parts = _parts(job)
        for name in names:
            parts[name].suspend()
        go.touch()
        time.sleep(seconds)
        assert job.poll() is None or names == ("guard",)  # which the others need not wait for
        for name in names:
            with suppress(psutil.NoSuchProcess):
                parts[name].resume()
        assert job.wait() == 0, job.text[-500:]
    lines = job.text.split()
    assert lines.count("done") == 2
    assert lines.count("20000") == 2
    assert "lockstep:" not in lines


@pytest.mark.cold
@pytest.mark.long
def test_between_hosts_a_launcher_that_stands_still_ends_its_job(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path / "job", command=["sleep", "300"], hosts="node1:1,node2:1") as job:
        job.wait_until(lambda: sum("sleep 300" in each for each in job.survivors()) == 2)
        job.signal(signal.SIGSTOP)
        time.sleep(20)
        assert not [each for each in job.survivors() if each.startswith("node")]  # ended without the launcher's word
        job.signal(signal.SIGCONT)
        assert job.wait() == 1
        assert "received nothing from the launcher for 9 s" in "\n".join(job.last_lines()), job.stderr
        job.wait_for_end(5)


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.parametrize("part", ["node", "guard"])
def test_suspended_remote_node_process_is_lost_but_not_its_guard(bed: Bed, tmp_path: Path, part: str) -> None:
    with Job(bed, tmp_path / "job", command=["sleep", "35"], hosts="node1:1,node2:1") as job:
        job.wait_until(lambda: sum("sleep 35" in each for each in job.survivors()) == 2)
        both = [process for process in bed.processes("node2") if NODE in process.cmdline()]
        guard = next(process for process in both if process.ppid() not in {each.pid for each in both})
        process = guard if part == "guard" else guard.children()[0]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(20)
        os.kill(process.pid, signal.SIGCONT)
        assert job.wait() == (1 if part == "node" else 0), job.stderr
        lost = "lockstep: lost node2: has been silent for 9 s"
        assert (lost in job.stderr) == (part == "node")
        job.wait_for_end(15)
