"""Jobs that continue without a lost host and readmit it."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import own_environment, run
from hosts import Bed
from ssh_job import Job, kill, name_of
from worker_kills import (
    FP64_SNAPSHOT_STEPS,
    fp64_training,
    newest_step,
    records,
    resized_differences,
    same_tensors,
    starts_of,
    steps_of,
)

pytestmark = pytest.mark.cold  # on hosts of their own


def test_training_goes_on_without_a_lost_host_and_takes_it_back(bed: Bed, tmp_path: Path) -> None:
    struck, calm = tmp_path / "struck", tmp_path / "calm"
    elastic = ["-H", "node1:1,node2:2", f"--ssh-option={bed.ssh_options}", "--max-restarts", "2", "--min-np", "1"]
    elastic += ["--start-timeout", "120"]
    # One thread a worker on each host, as on one machine; the hosts do not know that they share its cores.
    variables = ["env", f"PYTHONPATH={tmp_path}", "OMP_NUM_THREADS=1"]
    train = fp64_training(tmp_path, struck, *elastic, epochs=10)
    with Job(bed, tmp_path / "job", direct=[*variables, *train]) as job:
        job.wait_until(lambda: newest_step(struck) >= 12)
        bed.link_down("node2")
        job.wait_until(lambda: len(starts_of(struck)) == 2)
        bed.link_up("node2")
        assert job.wait() == 0, job.stderr
        job.wait_for_end(10)
    assert "lost node2" in job.stderr
    assert "restart 1 of 2, with 1 worker, of which 1 stays: 1 on node1" in job.stderr
    assert "lost node1" not in job.stderr  # its node process goes on alone
    assert job.files_left() == []
    done = run(fp64_training(tmp_path, calm, "-np", "3", epochs=10), tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert resized_differences(calm, struck) == []
    assert steps_of(struck, "epoch") == steps_of(calm, "epoch")


def _lose(bed: Bed, host: str) -> None:
    """Kill all processes of the job on a host, as if it had lost its power, but it can be reached again at once."""
    for process in bed.processes(host):
        if name_of(process) not in ("", "sshd"):
            kill(process.pid)


def _lose_hosts(bed: Bed, folder: Path, hosts: list[str], epochs: int, victims: list[str]) -> str:
    """Train on all hosts, of which some are lost in turn; check the result, and return what the job printed."""
    struck, calm = folder / "struck", folder / "calm"
    elastic = ["-H", ",".join(f"{host}:1" for host in hosts), f"--ssh-option={bed.ssh_options}"]
    elastic += ["--max-restarts", str(len(victims)), "--start-timeout", "120"]
    variables = ["env", f"PYTHONPATH={folder}", "OMP_NUM_THREADS=1"]
    train = fp64_training(folder, struck, *elastic, epochs=epochs)
    with Job(bed, folder / "job", direct=[*variables, *train]) as job:
        for number, victim in enumerate(victims):
            job.wait_until(lambda number=number: len(starts_of(struck)) == number + 1)
            job.wait_until(lambda: newest_step(struck) > starts_of(struck)[-1] + 8)
            _lose(bed, victim)
        assert job.wait() == 0, job.stderr
        job.wait_for_end(10)
        printed = job.stdout
        stay = len(hosts) - 1
        said = [line for line in job.stderr.splitlines() if line.startswith("lockstep: restart ")]
        assert [f", with {len(hosts)} workers, of which {stay} stay" in line for line in said] == [True] * len(victims)
    assert job.files_left() == []
    train = fp64_training(folder, calm, "-np", str(len(hosts)), epochs=epochs)
    done = run(train, folder, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert resized_differences(calm, struck) == []
    generations = [each for each in records(struck) if each["kind"] == "generation"]
    assert len(generations) == len(victims)
    assert all(each["repeated_steps"] <= 2 * FP64_SNAPSHOT_STEPS for each in generations)
    assert same_tensors(calm / "model.safetensors", struck / "model.safetensors")
    return printed


def test_workers_of_other_hosts_keep_their_processes(bed: Bed, tmp_path: Path) -> None:
    """Rank 0, the store and the records are on node1, which is lost."""
    printed = _lose_hosts(bed, tmp_path, ["node1", "node2"], 6, ["node1"])
    first, second = (
        re.findall(r"^worker \d of 2: .* process (\d+),", start, re.MULTILINE)
        for start in printed.split("run folder")[:2]
    )
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True]


@pytest.mark.long
def test_spare_host_is_prepared_and_steps_in(tmp_path: Path) -> None:
    with Bed(3) as bed:
        elastic = ["-H", "node1:1,node2:1,node3:1", f"--ssh-option={bed.ssh_options}", "--start-timeout", "120"]
        elastic += ["-np", "2", "--max-restarts", "1", "--spares", "1"]
        variables = ["env", f"PYTHONPATH={tmp_path}", "OMP_NUM_THREADS=1"]
        struck = tmp_path / "struck"
        (tmp_path / "slow").touch()  # the job is not to finish before the spare is ready
        train = fp64_training(tmp_path, struck, *elastic, epochs=10)
        with Job(bed, tmp_path / "job", direct=[*variables, *train]) as job:
            job.wait_until(lambda: any(map(_is_preloaded, bed.processes("node3"))))
            job.wait_until(lambda: newest_step(struck) >= 4)
            spare = [process.pid for process in bed.processes("node3") if _is_preloaded(process)]
            bed.link_down("node2")
            job.wait_until(lambda: len(starts_of(struck)) == 2)
            assert [process.pid for process in bed.processes("node3") if _is_preloaded(process)] == spare
            (tmp_path / "slow").unlink()
            assert job.wait() == 0, job.stderr
            job.wait_for_end(10)
        assert "restart 1 of 1, with 2 workers, of which 1 stays: 1 on node1, 1 on node3" in job.stderr


def _is_preloaded(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "preloaded for workers" in " ".join(process.cmdline())
    return False


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thirty_lost_hosts_change_nothing_of_the_result(tmp_path: Path) -> None:
    chance = random.Random(1)
    with Bed(3) as bed:
        victims = [chance.choice(bed.names) for _ in range(30)]
        _lose_hosts(bed, tmp_path, bed.names, 200, victims)
