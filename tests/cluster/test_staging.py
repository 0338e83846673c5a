"""`--stage`: shared files are copied along the hosts to their own disks, here to each host's own /dev/shm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import Bed
from slurm import Slurm
from ssh_job import Job, kill

from lockstep.launch.node.copies import DIGEST_BYTES
from lockstep.launch.plan.stage_options import BLOCK_BYTES

pytestmark = pytest.mark.cold  # on hosts of their own

HOSTS = "node1:1,node2:1,node3:1"
DISK = "/dev/shm"
COPIES = f"lockstep-staged-{os.getuid()}"


def test_only_the_first_host_reads_the_shared_files(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=3)
    for name in ("node2", "node3"):
        bed.hide(name, data)
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        assert job.wait(90) == 0, job.stderr
    assert sorted(job.stdout.splitlines()[1:]) == [f"node{number} {_digest(data)}" for number in (1, 2, 3)]
    assert f"copying {data} (4 files, " in job.stderr
    assert "on 3 hosts" in job.stderr
    assert job.survivors() == []


def test_next_job_uses_the_copies_until_a_file_changes(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=1)
    outputs = []
    for number, change in enumerate((None, None, b"2")):
        if change:
            _rewrite(data / "part0", change)
        with _job(bed, tmp_path / f"job{number}", data, HOSTS) as job:
            assert job.wait(90) == 0, job.stderr
        outputs.append(job)
        assert sorted(job.stdout.splitlines()[1:]) == [f"node{number} {_digest(data)}" for number in (1, 2, 3)]
    assert ["copying" in job.stderr for job in outputs] == [True, False, True]
    assert [len(_copies(bed, name)) for name in bed.names] == [1, 1, 1]  # without that of the old version


def test_copy_goes_on_after_a_killed_launcher(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=64)
    for name in bed.names:
        bed.limit(name, "50mbit")  # 0.17 s per block
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        _wait_until(lambda: len(_digests(bed, "node3")) >= 2)
        job.launcher.send_signal(signal.SIGKILL)
        _wait_until(lambda: not job.survivors())
    before = {name: _digests(bed, name) for name in bed.names}
    assert len(before["node3"]) < 64
    for name in bed.names:
        bed.limit(name, "")
    with _job(bed, tmp_path / "again", data, HOSTS) as job:
        _wait_until(lambda: all(_digests(bed, name)[: len(before[name])] == before[name] for name in bed.names))
        assert job.wait(90) == 0, job.stderr
    assert sorted(job.stdout.splitlines()[1:]) == [f"node{number} {_digest(data)}" for number in (1, 2, 3)]


def test_damaged_copy_is_replaced_by_that_of_another_host(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=2)
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        assert job.wait(90) == 0, job.stderr
    (copy,) = _copies(bed, "node1")
    (copy / "files" / "data" / "part1").write_bytes(b"damaged")
    with _job(bed, tmp_path / "again", data, HOSTS) as job:
        assert job.wait(90) == 0, job.stderr
    assert "on 1 host\n" in job.stderr
    assert sorted(job.stdout.splitlines()[1:]) == [f"node{number} {_digest(data)}" for number in (1, 2, 3)]


@pytest.mark.parametrize("victim", ["node1", "node2"])
def test_host_lost_while_copying_ends_the_job_by_name(bed: Bed, tmp_path: Path, victim: str) -> None:
    data = _data(tmp_path / "data", blocks=64)
    for name in bed.names:
        bed.limit(name, "50mbit")
    with _job(bed, tmp_path / "job", data, HOSTS) as job:
        _wait_until(lambda: _digests(bed, "node3"))
        for process in bed.processes(victim):
            kill(process.pid)
        assert job.wait(90) == 3
        _wait_until(lambda: not job.survivors())
    assert f"--stage: lost {victim}: " in job.stderr


def test_folder_that_hosts_share_is_refused(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=1)
    with _job(bed, tmp_path / "job", data, HOSTS, disk=str(tmp_path)) as job:
        assert job.wait(90) == 3
    assert "other hosts share" in job.stderr
    assert "by --stage-dir" in job.stderr


def test_host_that_joins_later_gets_the_same_copy(bed: Bed, tmp_path: Path) -> None:
    data = _data(tmp_path / "data", blocks=1)
    options = ["--max-restarts", "1", "--spares", "1"]
    with _job(bed, tmp_path / "job", data, HOSTS, options=["-np", "2", *options], tail="; sleep 600") as job:
        _wait_until(lambda: job.stdout.count("node") >= 2 and _copies(bed, "node3"))
        _rewrite(data / "part0", b"2")  # the job goes on with what it began with
        for process in bed.processes("node2"):
            kill(process.pid)
        _wait_until(lambda: "node3 " in job.stdout)
        job.launcher.send_signal(signal.SIGTERM)
        job.wait(90)
    digests = {line.split()[1] for line in job.stdout.splitlines() if line.startswith("node")}
    assert len(digests) == 1, job.stdout


def test_srun_starts_what_copies_in_a_slurm_job(slurm: Slurm, tmp_path: Path) -> None:
    data, disk = _data(tmp_path / "data", blocks=2), slurm.folder / "run"  # each host has its own
    job = [sys.executable, "-m", "lockstep", "run", "--no-observe", "--log-dir", str(tmp_path / "logs")]
    job += ["--stage", str(data), "--stage-dir", str(disk), "--", "sh", "-c", SHOW, str(data)]
    done = slurm.run(["salloc", "-N2", *job], timeout=250)
    assert sorted(done.stdout.splitlines()[1:]) == [f"{host} {_digest(data)}" for host in slurm.nodes]
    assert all((slurm.folder / host / COPIES).is_dir() for host in slurm.nodes)


def _data(folder: Path, blocks: int) -> Path:
    """Write a folder with so many files of a block each, and a small one."""
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "small").write_text("small")
    for number in range(blocks):
        (folder / f"part{number}").write_bytes(random.Random(number).randbytes(BLOCK_BYTES))
    return folder


def _rewrite(file: Path, content: bytes) -> None:
    """Change the content, but not the size and time."""
    status = file.stat()
    file.write_bytes(content + file.read_bytes()[len(content) :])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


SHOW = 'echo $(hostname) $(cd "$0" && cat part* inside/small | sha256sum | cut -c-64)'


def _digest(data: Path) -> str:
    parts = sorted(data.glob("part*"))
    files = b"".join(file.read_bytes() for file in (*parts, data / "inside" / "small"))
    return subprocess.run(["sha256sum"], input=files, capture_output=True, check=True).stdout[:64].decode()


def _job(
    bed: Bed, folder: Path, data: Path, hosts: str, disk: str = DISK, options: Sequence[str] = (), tail: str = ""
) -> Job:
    flags = ["--stage", str(data), "--stage-dir", disk, "--no-observe", *options]
    return Job(bed, folder, command=["sh", "-c", SHOW + tail, str(data)], hosts=hosts, options=flags)


def _copies(bed: Bed, name: str) -> list[Path]:
    """Return the complete copies on a host."""
    folder = bed.shared_memory(name) / COPIES
    return [path for path in folder.glob("*-*") if "." not in path.name] if folder.is_dir() else []


def _digests(bed: Bed, name: str) -> list[bytes]:
    """Return the digests of the blocks that are there of a copy."""
    digests = b"".join(file.read_bytes() for file in (bed.shared_memory(name) / COPIES).glob("*/digests"))
    return [digests[first : first + DIGEST_BYTES] for first in range(0, len(digests), DIGEST_BYTES)]


def _wait_until(condition: object, seconds: float = 120) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
