"""Workers that are killed cost seconds and nothing else."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest
from commands import own_environment, run, started
from worker_kills import (
    JOBS,
    disturb,
    fp64_training,
    resized_differences,
    starts_of,
    steps_of,
)


def test_two_kills_change_nothing_of_the_result(tmp_path: Path) -> None:
    outcome = disturb(JOBS["ddp"], tmp_path, epochs=12, kills=2, chance=random.Random(3), apart=0.25)
    assert outcome.breaches == []
    assert outcome.kills == 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_kills_change_nothing_of_the_result(tmp_path: Path) -> None:
    for name, words in JOBS.items():
        outcome = disturb(words, tmp_path / name, epochs=100, kills=25, chance=random.Random(0))
        assert outcome.breaches == []
        assert outcome.kills == 25


ONE_THREAD = own_environment(OMP_NUM_THREADS="1")


def _offer(folder: Path, slots: int) -> None:
    """Let this machine have so many slots; a reader never finds half a file."""
    (folder / "new").write_text(f"localhost:{slots}")
    (folder / "new").replace(folder / "hosts")


@pytest.mark.long
def test_three_workers_two_and_three_again_take_the_same_steps(tmp_path: Path) -> None:
    calm, changed, slow = tmp_path / "calm", tmp_path / "changed", tmp_path / "slow"
    slow.touch()
    _offer(tmp_path, 3)
    elastic = ["-np", "3", "--min-np", "2", "--host-discovery-script", f"cat {tmp_path / 'hosts'}"]
    with started(fp64_training(tmp_path, changed, *elastic), tmp_path, ONE_THREAD) as job:
        for slots, starts in ((2, 1), (3, 2)):
            job.wait_until(lambda starts=starts: len(starts_of(changed)) == starts)
            _offer(tmp_path, slots)
        job.wait_until(lambda: len(starts_of(changed)) == 3)
        slow.unlink()
        assert job.wait() == 0, job.text
    resized = [line.partition(", with ")[2] for line in job.text.splitlines() if "resized" in line]
    assert resized == ["2 workers, of which 2 stay", "3 workers, of which 2 stay"]
    done = run(fp64_training(tmp_path, calm, "-np", "3"), tmp_path, ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert resized_differences(calm, changed) == []


HELD_NET = """\
import os, time
from torch import nn

def build(num_classes):
    with open("building", "a") as file:
        print(os.getpid(), file=file, flush=True)
    while os.path.exists("held"):
        time.sleep(0.05)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    net.register_forward_pre_hook(lambda *arguments: time.sleep(0.03))  # the job is not to end before the kill
    return net
"""


def test_notice_while_workers_begin_again_leads_to_a_checkpoint(tmp_path: Path) -> None:
    """Those that stay keep it until they train; the new one, which cannot handle it yet, does not hear of it."""
    run, building = tmp_path / "run", tmp_path / "building"
    words = ["-np", "3", "-a", "held:build", "--max-restarts", "1", "--snapshot-steps", "1000000"]
    (tmp_path / "held.py").write_text(HELD_NET)
    with started(fp64_training(tmp_path, run, *words), tmp_path, ONE_THREAD) as job:
        job.wait_until(lambda: steps_of(run))
        (tmp_path / "held").touch()
        os.kill(job.workers()[1].pid, signal.SIGKILL)
        job.wait_until(lambda: len(building.read_text().split()) == 6)
        os.kill(job.pid, signal.SIGUSR1)
        (tmp_path / "held").unlink()
        assert job.wait() == 75, job.text
    first, then = building.read_text().split()[:3], building.read_text().split()[3:]
    assert len({*first} & {*then}) == 2
    assert re.search(r"stopped by SIGUSR1 after step \d+ of 288, with a checkpoint", job.text)


def test_notice_while_the_job_waits_for_hosts_is_kept(tmp_path: Path) -> None:
    """The worker that stays, whose state is newer than any checkpoint, writes one as soon as it can go on."""
    run = tmp_path / "run"
    (tmp_path / "slow").touch()
    _offer(tmp_path, 2)
    words = ["-np", "2", "--min-np", "2", "--max-restarts", "1", "--snapshot-steps", "1000000"]
    read, ran = tmp_path / "hosts", tmp_path / "ran"
    words += ["--host-discovery-script", f"echo >> {ran}; cat {read}"]
    with started(fp64_training(tmp_path, run, *words), tmp_path, ONE_THREAD) as job:
        job.wait_until(lambda: steps_of(run))
        _offer(tmp_path, 1)
        before = len(ran.read_text())
        job.wait_until(lambda: len(ran.read_text()) >= before + 3)  # so the last but one was read, which began after it
        os.kill(job.workers()[1].pid, signal.SIGKILL)
        job.wait_for("waiting for hosts")
        os.kill(job.pid, signal.SIGUSR1)
        _offer(tmp_path, 2)
        assert job.wait() == 75, job.text
    assert re.search(r"stopped by SIGUSR1 after step \d+ of [\d,]+, with a checkpoint", job.text)
