"""`--stage`: shared files are copied along the hosts to their own disks, here to each host's own /dev/shm."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import Bed
from slurm import Slurm
from ssh_job import Job, kill
from time_limits import extended, wait_until

from lockstep.launch.staging.tar_stream import CHUNK_BYTES

pytestmark = pytest.mark.cold  # on hosts of their own

HOSTS = "node1:1,node2:1,node3:1"
DISK = "/dev/shm"
COPIES = "lockstep-staged-*"


def test_only_the_first_host_reads_the_shared_files(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=3)
    for name in ("node2", "node3"):
        bed.hide(name, data)
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        assert job.wait() == 0, job.stderr
    assert sorted(job.stdout.splitlines()[1:]) == [f"node{number} {_digest(data)}" for number in (1, 2, 3)]
    assert f"copying {data} to {DISK}/lockstep-staged-" in job.stderr
    assert "on 3 hosts" in job.stderr
    assert "copied 3.2 MB in " in job.stderr
    assert job.survivors() == []
    assert [_copies(bed, name) for name in bed.names] == [[], [], []]


def test_copies_are_removed_when_the_launcher_is_killed(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=64)
    for name in bed.names:
        bed.limit(name, "50mbit")  # 0.17 s per block
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        wait_until(lambda: _copies(bed, "node3"))
        job.launcher.send_signal(signal.SIGKILL)
        wait_until(lambda: not job.survivors() and not any(_copies(bed, name) for name in bed.names))


def test_restart_uses_the_copies_again(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=1)
    tail = f"; test -e {tmp_path}/failed || {{ touch {tmp_path}/failed; exit 1; }}"
    with _job(bed, tmp_path / "job", data, HOSTS, options=["--max-restarts", "2"], tail=tail) as job:
        assert job.wait() == 0, job.stderr
    assert job.stderr.count("copying") == 1
    assert {line.split()[1] for line in job.stdout.splitlines() if line.startswith("node")} == {_digest(data)}


def test_host_lost_while_copying_ends_the_job_by_name(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=64)
    for name in bed.names:
        bed.limit(name, "50mbit")
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        wait_until(lambda: _copies(bed, "node3"))
        for process in bed.processes("node2"):
            kill(process.pid)
        assert job.wait() == 3
        wait_until(lambda: not job.survivors())
    assert "--stage: lost node2: " in job.stderr


def test_manually_started_nodes_stage_with_a_secret(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=2)
    show = SHOW.replace("echo $(hostname)", 'echo $(hostname) "$0"')
    flags = ["--stage", str(data), "--stage-dir", DISK, "--no-observe", "--nodes", "2", "-np", "1"]
    flags += ["--master-addr", bed.addresses["node1"], "--node-rank"]
    nodes = []
    for number, name in enumerate(("node1", "node2")):
        command = [sys.executable, "-m", "lockstep", "run", *flags, str(number), "--", "sh", "-c", show]
        environment = {**bed.environment(name), "LOCKSTEP_JOB_SECRET": "secret"}
        options = {"env": environment, "stdout": subprocess.PIPE, "cwd": tmp_path}
        nodes.append(bed.start(name, [*command, str(data) if number == 0 else "/elsewhere"], **options))
    out = [extended(lambda seconds, node=node: node.communicate(timeout=seconds))[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], out
    found = sorted(line.split() for line in out[0].splitlines() if _digest(data) in line)
    assert [host for host, _, _ in found] == ["node1", "node2"], out
    assert all(path.startswith(f"{DISK}/lockstep-staged-") for _, path, _ in found)
    assert [_copies(bed, name) for name in bed.names] == [[], [], []]


def test_host_that_joins_later_gets_the_same_copy(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=1)
    options = ["--max-restarts", "1", "--spares", "1"]
    with _job(bed, tmp_path / "job", data, HOSTS, options=["-np", "2", *options], tail="; sleep 600") as job:
        wait_until(lambda: job.stdout.count("node") >= 2 and "on 1 host\n" in job.stderr and _copies(bed, "node3"))
        wait_until(lambda: job.stderr.count("copied") == 2)  # for the spare, too
        (data / "part0").write_bytes(b"2")  # the job goes on with what it began with
        for process in bed.processes("node2"):
            kill(process.pid)
        wait_until(lambda: "node3 " in job.stdout)
        job.launcher.send_signal(signal.SIGTERM)
        job.wait()
    digests = {line.split()[1] for line in job.stdout.splitlines() if line.startswith("node")}
    assert len(digests) == 1, job.stdout


def test_srun_starts_what_copies_in_a_slurm_job(slurm: Slurm, tmp_path: Path) -> None:
    data, disk = _data(tmp_path / "data", blocks=2), slurm.folder / "run"  # each host has its own
    job = [sys.executable, "-m", "lockstep", "run", "--no-observe", "--log-dir", str(tmp_path / "logs")]
    job += ["--stage", str(data), "--stage-dir", str(disk), "--", "sh", "-c", SHOW, str(data)]
    done = slurm.run(["salloc", "-N2", *job])
    assert sorted(done.stdout.splitlines()[1:]) == [f"{host} {_digest(data)}" for host in slurm.nodes]
    assert not any([*(slurm.folder / host).glob(COPIES)] for host in slurm.nodes)


def _data(folder: Path, blocks: int) -> Path:
    """Write a folder with so many files of a block each, and a small one."""
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "small").write_text("small")
    for number in range(blocks):
        (folder / f"part{number}").write_bytes(random.Random(number).randbytes(CHUNK_BYTES))
    return folder


SHOW = 'echo $(hostname) $(cd "$0" && cat part* inside/small | sha256sum | cut -c-64)'


def _digest(data: Path) -> str:
    parts = sorted(data.glob("part*"))
    files = b"".join(file.read_bytes() for file in (*parts, data / "inside" / "small"))
    return subprocess.run(["sha256sum"], input=files, capture_output=True, check=True).stdout[:64].decode()


def _job(bed: Bed, folder: Path, data: Path, hosts: str, options: Sequence[str] = (), tail: str = "") -> Job:
    flags = ["--stage", str(data), "--stage-dir", DISK, "--no-observe", *options]
    return Job(bed, folder, command=["sh", "-c", SHOW + tail, str(data)], hosts=hosts, options=flags)


def _copies(bed: Bed, name: str) -> list[Path]:
    """Return the copies on a host, complete or not."""
    return [*bed.shared_memory(name).glob(f"{COPIES}/0/*")]
