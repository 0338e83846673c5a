"""Workers that keep their processes when others are lost, hosts that come and go, and how such a job ends."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import HOROVODRUN, LOCKSTEP, Job, run, started
from time_limits import wait_for_ends

# A worker that says where it is in each generation, and goes on when the test names the generation's end in a file:
# `done` ends it, `die R` kills rank R, and otherwise it waits for something that is lost when another worker dies.
WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path
from lockstep.world.generations import host_changes, join_next, stay
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.rendezvous import open_store
folder = Path(sys.argv[1])
if (folder / "daemons").exists():
    daemon = "setsid sleep 1000 > /dev/null 2>&1 & echo slot $HOROVOD_LOCAL_RANK left $!"
    subprocess.run(["sh", "-c", daemon])
    subprocess.run(["env", "-i", "HOROVOD_LOCAL_RANK=env", "sh", "-c", daemon])
started_as = "/".join(os.environ[f"HOROVOD_{name}"] for name in "RANK SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE".split())
stay(must_lead=True)
while True:
    own = RankInfo.from_environment()
    generation, store = own.restart + 1, open_store(own, 60)
    print(f"G{generation} rank {own.rank}/{own.size} local {own.local_rank}/{own.local_size} "
          f"slot {os.environ['HOROVOD_LOCAL_RANK']} pid {os.getpid()}")
    print(f"G{generation} rank {own.rank} was started as {started_as}")
    for _ in range(2000):
        order = folder / f"G{generation}"
        words = order.read_text().split() if order.exists() else []
        if words == ["done"]:
            sys.exit(0)
        if words == ["leave"]:
            break
        if words == ["die", str(own.rank)]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            store.check(["alive"])
        except RuntimeError:
            print(f"G{generation} is lost")
            break
        if host_changes(0)[1]:
            print(f"G{generation} hears of change {host_changes(0)}")
            break
        time.sleep(0.02)
    join_next()
"""


class ElasticJob:
    """A running elastic job, and its orders."""

    def __init__(self, folder: Path, process: Job) -> None:
        self.folder, self.process = folder, process

    def order(self, generation: int, text: str) -> None:
        draft = self.folder / "draft"
        draft.write_text(text)
        draft.rename(self.folder / f"G{generation}")

    def wait_for(self, generation: int, size: int) -> list[tuple[int, int, int]]:
        """(slot, local rank, pid) by rank, when all workers have said that they are in the generation."""
        form = rf"^\[(\d+)\]<stdout>:G{generation} rank (\d+)/{size} local (\d+)/{size} slot (\d+) pid (\d+)$"
        self.process.wait_until(lambda: len(re.findall(form, self.text, re.MULTILINE)) >= size)
        found = re.findall(form, self.text, re.MULTILINE)
        by_rank = sorted((int(rank), int(slot), int(local), int(pid)) for _, rank, local, slot, pid in found)
        assert [rank for rank, *_ in by_rank] == list(range(size))
        assert all(prefix == rank for prefix, rank, *_ in found)
        return [(slot, local, pid) for _, slot, local, pid in by_rank]

    def left_behind(self) -> dict[str, list[int]]:
        """By slot, the pids of the daemons that workers have started; by "env" of those that do not know their slot."""
        found: dict[str, list[int]] = {}
        for slot, pid in re.findall(r"slot (\w+) left (\d+)", self.text):
            found.setdefault(slot, []).append(int(pid))
        return found

    @property
    def text(self) -> str:
        return self.process.text


@contextmanager
def elastic(folder: Path, *flags: str) -> Iterator[ElasticJob]:
    script = folder / "worker.py"
    script.write_text(WORKER)
    with started([*HOROVODRUN, *flags, sys.executable, script, folder], folder) as process:
        yield ElasticJob(folder, process)


def test_only_the_dead_worker_is_replaced_and_rank_0_survives(tmp_path: Path) -> None:
    with elastic(tmp_path, "--min-np", "1", "-np", "3") as job:
        first = job.wait_for(1, 3)
        assert [(slot, local) for slot, local, _ in first] == [(0, 0), (1, 1), (2, 2)]
        job.order(1, "die 0")
        second = job.wait_for(2, 3)
        assert second[:2] == first[1:]
        assert second[2][:2] == (0, 0)
        assert second[2][2] != first[0][2]
        job.process.wait_for("G2 rank 2 was started as 2/3/3/0/1")
        assert [f"G1 rank {rank} was started as {rank}/3/3/0/1" in job.text for rank in range(3)] == [True] * 3
        assert job.text.count("G1 is lost") == 2
        assert "lockstep: worker 0 of 3 was ended by SIGKILL (possibly out of memory); 2 of the others stay" in job.text
        assert "lockstep: restart 1 of 100, with 3 workers, of which 2 stay" in job.text
        job.order(2, "done")
        assert job.process.wait(150) == 0


# horovodrun with short limits for leaving a generation.
IMPATIENT = """
import sys
from dataclasses import replace
from lockstep.cli import horovodrun
from lockstep.launch.controller.restarts import Generations
numbered = Generations._numbered
def with_short_limits(*arguments):
    plan = numbered(*arguments)
    return replace(plan, timings=replace(plan.timings, worker_end=0.6, blocked=0.7, leave=1.5))
Generations._numbered = with_short_limits
sys.exit(horovodrun.main())
"""
STUCK = """
import os, signal, time
from pathlib import Path
from lockstep.diagnosis import publisher
from lockstep.world.generations import stay
publisher.start()
def wait_for_nothing():
    stay(must_lead=True)
    Path("waits").touch()
    time.sleep(1000)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["HOROVOD_RANK"] == "1":
        wait_for_nothing()
    while not os.path.exists("waits"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_that_does_not_leave_is_named_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [sys.executable, "-c", IMPATIENT, "--min-np", "1", "-np", "2", sys.executable, "stuck.py"]
    done = run(command, tmp_path)
    assert "killed, because it has not left its generation within 1.5 s: rank 1 is in user code" in done.stderr
    assert re.search(r'File ".*stuck\.py", line 10, in wait_for_nothing', done.stderr), done.stderr


HUNG = """
import os, signal, sys, threading, time
from lockstep.world import generations
lock = threading.Lock()
lock.acquire()
generations.stay(limits=generations.Waits(hung=1.0))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("again", os.environ["RANK"])
elif os.environ["RANK"] == "1":
    open("waits", "w").close()
    exec(compile("lock.acquire()", "/site-packages/torch/distributed/distributed_c10d.py", "exec"))
else:
    while not os.path.exists("waits"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worker_that_hangs_in_a_collective_starts_again(tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(HUNG)
    done = run([*LOCKSTEP, "run", "-np", "2", "--max-restarts", "1", "--", sys.executable, "hung.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a collective has not returned 1 s after its connections were shut down (/site-packages/" in done.stderr
    assert "lockstep: worker 0 of 2 was ended by SIGKILL (possibly out of memory)" in done.stderr
    assert sorted(re.findall(r"again \d", done.stdout)) == ["again 0", "again 1"]


def test_hosts_that_are_found_and_lost_change_the_job(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    script = f"test ! -e {tmp_path}/broken && cat {hosts}"
    with elastic(tmp_path, "--min-np", "1", "--max-np", "2", "--host-discovery-script", script) as job:
        first = job.wait_for(1, 1)
        hosts.write_text("localhost:9\n")
        second = job.wait_for(2, 2)
        assert second[0] == first[0]
        (tmp_path / "broken").touch()
        job.process.wait_for("exited with code 1")
        time.sleep(2.5)
        assert job.text.count("exited with code 1") == 1
        assert "G3" not in job.text
        hosts.write_text("localhost:1\n")
        (tmp_path / "broken").unlink()
        assert job.wait_for(3, 1) == first
        job.order(3, "done")
        assert job.process.wait(150) == 0
        assert not psutil.pid_exists(second[1][2])
        assert "G1 hears of change (1, 2)" in job.text
        assert re.search(r"G2 hears of change \([12], 1\)", job.text)


def test_workers_outlast_a_moment_without_slots(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    with elastic(tmp_path, "--min-np", "1", "-np", "2", "--host-discovery-script", f"cat {hosts}") as job:
        first = job.wait_for(1, 2)
        hosts.write_text("localhost:0\n")
        time.sleep(3)
        hosts.write_text("localhost:2\n")
        time.sleep(1)
        assert "hears" not in job.text
        assert job.wait_for(1, 2) == first
        job.order(1, "done")
        assert job.process.wait(150) == 0


def test_oldest_workers_stay_when_slots_are_lost(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    with elastic(tmp_path, "--min-np", "1", "-np", "2", "--host-discovery-script", f"cat {hosts}") as job:
        first = job.wait_for(1, 2)
        job.order(1, "die 0")
        job.wait_for(2, 2)
        hosts.write_text("localhost:1\n")
        assert job.wait_for(3, 1) == [(1, 1, first[1][2])]
        job.order(3, "done")
        assert job.process.wait(150) == 0


def test_workers_that_left_without_a_failure_have_not_finished(tmp_path: Path) -> None:
    with elastic(tmp_path, "--min-np", "1", "-np", "2", "--reset-limit", "1") as job:
        first = job.wait_for(1, 2)
        job.order(1, "leave")
        assert job.wait_for(2, 2) == first
        job.order(2, "leave")
        assert job.process.wait(150) == 1
        assert "lockstep: not restarting again: --reset-limit 1" in job.text


def test_a_worker_that_fails_at_once_ends_the_job(tmp_path: Path) -> None:
    script = "test $HOROVOD_LOCAL_RANK = 1 && exit 5; sleep 60"
    done = run([*HOROVODRUN, "--min-np", "1", "-np", "2", "sh", "-c", script], tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "lockstep: worker 1 of 2 failed with exit code 5; the others were stopped\n"
        "lockstep: not restarting: no worker with the job's state is left\n"
    )


@pytest.mark.parametrize("victim", ["launcher", "node process"])
def test_no_process_outlives_the_launcher_or_the_node_process(tmp_path: Path, victim: str) -> None:
    (tmp_path / "daemons").touch()
    with elastic(tmp_path, "--min-np", "1", "-np", "2") as job:
        workers = [psutil.Process(pid) for *_, pid in job.wait_for(1, 2)]
        left = [psutil.Process(pid) for pids in job.left_behind().values() for pid in pids]
        assert len(left) == 4
        node = workers[0].parent()
        assert node in workers[1].parents()
        if victim == "launcher":
            job.process.kill()
            assert job.process.wait(150) == -signal.SIGKILL
        else:
            node.kill()
            assert job.process.wait(150) == 1
            assert "lockstep: lost localhost: its part of the launcher" in job.text
        wait_for_ends([*workers, *left])


def test_orphans_end_with_their_dead_worker_or_the_job(tmp_path: Path) -> None:
    (tmp_path / "daemons").touch()
    with elastic(tmp_path, "--min-np", "1", "-np", "2") as job:
        job.wait_for(1, 2)
        first = job.left_behind()
        job.order(1, "die 0")
        job.wait_for(2, 2)
        job.process.wait_until(lambda: not psutil.pid_exists(first["0"][0]))
        assert all(psutil.pid_exists(pid) for pid in [*first["1"], *first["env"]])
        job.order(2, "done")
        assert job.process.wait(150) == 0
        left = [pid for pids in job.left_behind().values() for pid in pids]
        assert len(left) == 6
        while any(psutil.pid_exists(pid) for pid in left):  # until those that were killed are reaped
            time.sleep(0.05)


def test_plain_script_goes_on_when_hosts_are_added(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    wait = f"echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.05; done; echo over"
    command = [*HOROVODRUN, "--min-np", "1", "--max-np", "2", "--host-discovery-script", f"cat {hosts}"]
    with started([*command, "sh", "-c", wait], tmp_path) as job:
        job.wait_for("[0]<stdout>:up")
        hosts.write_text("localhost:2\n")
        job.wait_for("2 slots are available")
        time.sleep(1.0)  # in which a signal would end it
        (tmp_path / "end").touch()
        assert job.wait(150) == 0
        assert [job.text.count(f"[0]<stdout>:{word}") for word in ("up", "over")] == [1, 1]
        assert "resized" not in job.text
