"""The network between the hosts of a job is cut for a while: 5 s are outlived, 60 s end the job on every host.

Hosts are network namespaces of this machine, joined by ssh. A cut pulls a host's cable out of the switch.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from hosts import Bed
from runs import final_weights, losses
from ssh_job import Job
from worker_group import run_in_workers

from lockstep.cli.parse import parse_train
from lockstep.train.run import run
from lockstep.world.world import World

pytestmark = pytest.mark.cold

HOSTS = "node1:1,node2:1"
CUT = "node2"  # which loses the launcher and its only peer
END_SECONDS = 40.0  # in which all hosts' parts have ended: 9 s of silence, 3 s from SIGTERM to SIGKILL, and a slow rest
WORDS = ("digits", "-b", "32", "--checkpoint-epochs", "0", "--device", "cpu")
START = ("--start-timeout", "120")


def _cut(job: Job, seconds: float) -> None:
    job.bed.link_down(CUT)
    time.sleep(seconds)
    job.bed.link_up(CUT)


def test_launcher_keeps_its_hosts_through_a_cut_of_five_seconds(bed: Bed, tmp_path: Path) -> None:
    wait = 'echo here; until [ -e "$0" ]; do sleep 0.1; done'
    go = tmp_path / "go"
    with Job(bed, tmp_path / "job", command=["sh", "-c", wait, str(go)], hosts=HOSTS, options=START) as job:
        job.wait_until(lambda: job.stdout.count("here") == 2)
        _cut(job, 5)
        time.sleep(5)  # who has heard nothing since just before the cut knows it by now
        go.touch()
        assert job.wait() == 0, job.stderr
        assert "lockstep:" not in job.stderr
        job.wait_for_end(30)
    assert job.files_left() == []


def _train(world: World, path: Path, epochs: str) -> None:
    run(parse_train([*WORDS, "--epochs", epochs, "--run-dir", str(path)]).job, world)


def _start_training(bed: Bed, folder: Path, epochs: str) -> Job:
    # One thread a worker, as the twin has; two hosts' workers do not know that they share this machine's cores.
    train = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "lockstep", "train", *WORDS, "--epochs", epochs]
    command = [*train, "--run-dir", str(folder / "run")]
    return Job(bed, folder / "job", command=command, hosts=HOSTS, options=START)


@pytest.mark.long
def test_training_after_a_cut_of_five_seconds_is_bit_identical(bed: Bed, tmp_path: Path) -> None:
    run_in_workers(2, _train, tmp_path / "whole", "30")
    with _start_training(bed, tmp_path, "30") as job:
        job.wait_until(lambda: re.search(r"epoch +2/", job.stdout))
        _cut(job, 5)
        assert job.launcher.poll() is None
        assert job.wait() == 0, job.stderr
    assert final_weights(tmp_path / "run") == final_weights(tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.long
def test_cut_of_a_minute_ends_the_job_and_names_the_host(bed: Bed, tmp_path: Path) -> None:
    with _start_training(bed, tmp_path, "5000") as job:
        job.wait_until(lambda: re.search(r"epoch +2/", job.stdout))
        job.bed.link_down(CUT)
        cut = time.monotonic()
        job.wait_for_end(END_SECONDS)
        took = time.monotonic() - cut
        assert job.wait() == 1
        assert job.last_lines() == [
            f"lockstep: lost {CUT}: has been silent for 9 s: the host or the network is down; the others were stopped"
        ]
        time.sleep(60 - took)
        job.bed.link_up(CUT)
        time.sleep(2)
        assert job.survivors() == []
    assert job.files_left() == []
    print(f"all ended {took:.1f} s after the cut")
