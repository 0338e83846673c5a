"""The launcher, a host's node process or its guard stands still for a while (a suspended machine, a debugger, SIGSTOP).

On one machine that costs nothing but the output's delay. Between hosts, silence of more than 9 s is taken for death.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, started
from hosts import Bed
from ssh_job import Job

# Each worker writes more than a pipe holds, after it has seen the file.
WORKER = 'echo here; until [ -e "$0" ]; do sleep 0.1; done; seq 1 20000; echo done'


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
        (("launcher", "node", "guard"), 2.0),
        *(pytest.param((name,), 20.0, marks=pytest.mark.long) for name in ("launcher", "node", "guard")),
    ],
)
def test_suspended_process_continues_afterwards_on_one_machine(
    tmp_path: Path, names: tuple[str, ...], seconds: float
) -> None:
    go = tmp_path / "go"
    with started([*LOCKSTEP, "run", "-np", "2", "--", "sh", "-c", WORKER, go], tmp_path) as job:
        job.wait_until(lambda: job.text.count("here") == 2, 60)
        parts = _parts(job)
        for name in names:
            parts[name].suspend()
        go.touch()
        time.sleep(seconds)
        assert job.poll() is None or names == ("guard",)  # which the others need not wait for
        for name in names:
            with suppress(psutil.NoSuchProcess):
                parts[name].resume()
        assert job.wait(30) == 0, job.text[-500:]
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
        job.seconds_to_end(5)


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
        assert job.wait(40) == (1 if part == "node" else 0), job.stderr
        lost = "lockstep: lost node2: has been silent for 9 s"
        assert (lost in job.stderr) == (part == "node")
        job.seconds_to_end(15)
