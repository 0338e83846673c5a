"""Jobs over several hosts by ssh: who is who, how a job starts, how it fails, and that nothing of it stays behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from hosts import NAMESPACES, Bed, missing
from ssh_job import Job, kill
from time_limits import extended, scaled, wait_until

import lockstep

pytestmark = pytest.mark.cold  # on hosts of their own

END_SECONDS = 30  # after a failure that the launcher sees; alone, a machine takes at most 10 s


def test_ranks_and_variables_follow_the_order_of_the_hosts(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "*:when=go", "*:exit=0", hosts="node2:1,node3:1,node1:2") as job:
        workers = job.workers(4)
        job.tell("go")
        assert job.wait() == 0
    place = [
        (worker["host"], *(worker["environment"][name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")))
        for worker in workers.values()
    ]
    assert place == [
        ("node2", "0", "1", "0"),
        ("node3", "0", "1", "1"),
        ("node1", "0", "2", "2"),
        ("node1", "1", "2", "2"),
    ]
    for rank, worker in workers.items():
        environment = worker["environment"]
        assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "4")
        assert environment["MASTER_ADDR"] == bed.addresses["node2"]
        assert environment["GLOO_SOCKET_IFNAME"] == bed.interfaces[worker["host"]]
        assert environment["TMPDIR"].startswith(str(bed.temporary(worker["host"])))
        assert worker["cwd"] == str(tmp_path)
    assert len({worker["environment"]["MASTER_PORT"] for worker in workers.values()}) == 1
    assert job.survivors() == []
    assert job.files_left() == []


def test_job_started_on_one_of_its_hosts_needs_no_ssh_to_itself(bed: Bed, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=2\nnode2 slots=1  # the other one\n")
    with Job(bed, tmp_path / "job", "*:when=go", "*:exit=0", hosts=f"@{file}", start_from="node1") as job:
        workers = job.workers(3)
        assert [worker["host"] for worker in workers.values()] == ["node1", "node1", "node2"]
        assert bed.sessions("node1") == []
        assert len(bed.sessions("node2")) == 1
        job.tell("go")
        assert job.wait() == 0


def test_traceback_of_a_raw_script_is_printed_once_and_last(bed: Bed, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\n"
        "print('hello from', os.environ['RANK'], flush=True)\n"
        "if os.environ['RANK'] == '2':\n    raise ValueError('no such luck')\n"
        "time.sleep(100)\n"
    )
    with Job(bed, tmp_path / "job", command=[sys.executable, str(script)], options=["--no-preload"]) as job:
        assert job.wait() == 1
    words = job.last_lines()
    assert words[0] == "lockstep: worker 2 of 3 on node2 failed with exit code 1; the others were stopped"
    (log,) = [line.removeprefix("its log: ") for line in words if line.startswith("its log: ")]
    traceback = [line for line in words[1:] if not line.startswith("its log: ")]
    assert (traceback[0], traceback[-1]) == ("Traceback (most recent call last):", "ValueError: no such luck")
    assert (job.stdout + job.stderr).count("Traceback") == 1
    assert (job.stdout + job.stderr).count("ValueError: no such luck") == 1
    log_text = Path(log).read_text()
    assert "ValueError: no such luck" in log_text
    assert "hello from 2" in log_text
    assert job.survivors() == []


def test_the_first_failure_ends_workers_that_will_not_listen(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "*:stubborn", "*:loader", "2:when=go", "2:exit=7") as job:
        job.workers(3)
        job.tell("go")
        job.wait_for_end(END_SECONDS)
        assert job.wait() == 7
    assert "worker 2 of 3 on node2 failed with exit code 7; the others were stopped" in job.stderr
    assert job.files_left() == []


def test_killed_worker_is_named_though_its_neighbor_stays(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "*:loader", "0:stubborn") as job:
        kill(job.workers(3)[1]["pid"])
        job.wait_for_end(END_SECONDS)
        assert job.wait() == 128 + signal.SIGKILL
    assert "lockstep: worker 1 of 3 on node1 was ended by SIGKILL" in job.stderr
    assert "; the others were stopped" in job.stderr
    assert job.files_left() == []


def test_a_killed_loader_process_is_its_workers_error(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "2:loader") as job:
        loader = job.workers(3)[2]["loader"]
        kill(loader)
        assert job.wait(END_SECONDS) == 1
    assert "lockstep: worker 2 of 3 on node2 failed with exit code 1" in job.stderr
    assert f"RuntimeError: the loader process {loader} was killed" in job.last_lines()
    assert job.survivors() == []


OF_SSH = [  # what ssh says of them: test_job_outcome
    ("node1:1,closed:1", (), "closed", "SSH server"),
    ("node1:1,stranger:1", (), "stranger", "host key"),
    ("node1:1,nowhere.invalid:1", (), "nowhere.invalid", "name"),
]


@pytest.mark.parametrize(
    ("hosts", "options", "named", "fix"),
    [
        ("node1:1,ghost:1", (), "ghost", "it is up"),
        ("node1:1,nokey:1", (), "nokey", "key"),
        ("node1:1,node2:1", ("--python", "/no/such/python"), "node", "--python"),  # whichever answers first
        ("node1:1,node2:1", ("--python", "{without}"), "node", "lockstep"),
        ("node1:1,node2:1", ("--python", "{older}"), "node2", "0.0.1"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in OF_SSH),
    ],
    ids=["unreachable", "no key", "no python", "no package", "version", "refused", "unknown host key", "no such name"],
)
def test_a_host_that_cannot_start_is_named_with_the_fix(
    bed: Bed, tmp_path: Path, hosts: str, options: tuple[str, ...], named: str, fix: str
) -> None:
    pythons = {"without": _python(tmp_path, "without", "-S"), "older": _older(tmp_path)}
    words = ["--start-timeout", f"{scaled(20):.0f}", *(word.format(**pythons) for word in options)]
    start_from = "node1" if fix == "0.0.1" else "head"  # where Python is the one that was started
    with Job(bed, tmp_path / "job", hosts=hosts, options=words, start_from=start_from) as job:
        assert job.wait() not in (0, 1)
    lines = [line for line in job.stderr.splitlines() if line.startswith("lockstep: ")]
    assert lines, job.stderr
    assert named in lines[-1]
    assert fix in lines[-1]
    assert "Traceback" not in job.stderr
    assert list(job.ready.iterdir()) == []
    assert job.survivors() == []
    assert job.files_left() == []


def _python(folder: Path, name: str, *words: str, path: str = "") -> str:
    """A Python of another kind: this one with more words, or with a folder before all others in its path."""
    script = folder / name
    setting = f"PYTHONPATH={path} " if path else ""
    script.write_text(f'#!/bin/sh\n{setting}exec {sys.executable} {" ".join(words)} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _older(folder: Path) -> str:
    """A Python with another Lockstep: the same modules, but its version is 0.0.1."""
    site = folder / "site"
    package = site / "lockstep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "0.0.1"\n__path__ = {list(lockstep.__path__)}\n')
    return _python(folder, "older", path=str(site))


def test_ctrl_c_lets_workers_stop_in_order(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "*:note") as job:
        job.workers(3)
        job.signal(signal.SIGINT)
        assert job.wait(END_SECONDS) == 75
        notes = {path.name: path.read_text().split() for path in job.ready.glob("*.signals")}
        assert notes == {f"{rank}.signals": ["SIGTERM"] for rank in range(3)}
        assert job.survivors() == []


def test_sigusr1_reaches_every_worker(bed: Bed, tmp_path: Path) -> None:
    with Job(bed, tmp_path, "*:note", "*:when=go", "*:exit=0") as job:
        job.workers(3)
        job.signal(signal.SIGUSR1)
        paths = [job.ready / f"{rank}.signals" for rank in range(3)]
        job.wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
        assert [path.read_text().split() for path in paths] == [["SIGUSR1"]] * 3
        job.tell("go")
        assert job.wait() == 0


def test_nothing_of_a_bed_is_left() -> None:
    if reason := missing():
        pytest.skip(reason)
    with Bed(hosts=1) as bed:
        sleeper = bed.start("node1", ["sleep", "600"])
        wait_until(lambda: bed.processes("node1"))  # before it is there, nothing of the bed knows it
        spaces = [bed.namespace(name) for name in ("node1", "head", "switch")]
        assert all((NAMESPACES / space).exists() for space in spaces)
    assert extended(sleeper.wait) == -9
    assert not any((NAMESPACES / space).exists() for space in spaces)
    assert not any((Path("/etc/netns") / space).exists() for space in spaces)
    assert not bed.folder.exists()
