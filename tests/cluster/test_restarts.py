"""Jobs that continue without a lost host and readmit it."""

from __future__ import annotations

import random
import re
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from commands import own_environment, run
from hosts import Bed
from safetensors.torch import load_file
from ssh_job import Job, kill, name_of

from lockstep.files.jsonl import read_records

pytestmark = pytest.mark.cold  # on hosts of their own

NET = """\
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, num_classes))
"""


INTERVAL = 4  # steps between two snapshots


def _train(folder: Path, run: Path) -> list[str]:
    (folder / "net.py").write_text(NET)
    train = [sys.executable, "-m", "lockstep", "train", "digits"]
    train += ["-a", "net:build", "-b", "20", "--epochs", "10", "--precision", "fp64", "--checkpoint-epochs", "0"]
    return [*train, "-p", str(INTERVAL), "--io-every", "0", "--track", "--run-dir", str(run)]


def _steps(run: Path, kind: str) -> list[int]:
    path = run / "metrics.jsonl"
    return [each["step"] for each in read_records(path) if each["kind"] == kind] if path.exists() else []


def test_training_goes_on_without_a_lost_host_and_takes_it_back(bed: Bed, tmp_path: Path) -> None:
    struck, calm = tmp_path / "struck", tmp_path / "calm"
    elastic = ["-H", "node1:1,node2:2", f"--ssh-option={bed.ssh_options}", "--max-restarts", "2", "--min-np", "1"]
    elastic += ["--start-timeout", "120"]
    # One thread a worker on each host, as on one machine; the hosts do not know that they share its cores.
    variables = ["env", f"PYTHONPATH={tmp_path}", "OMP_NUM_THREADS=1"]
    with Job(bed, tmp_path / "job", direct=[*variables, *_train(tmp_path, struck), *elastic]) as job:
        job.wait_until(lambda: max(_steps(struck, "step"), default=0) >= 12, 120)
        bed.link_down("node2")
        job.wait_until(lambda: len(_steps(struck, "run")) == 2, 120)
        bed.link_up("node2")
        assert job.wait(240) == 0, job.stderr
        job.wait_for_end(10)
    assert "lost node2" in job.stderr
    assert "restart 1 of 2, with 1 worker, of which 1 stays: 1 on node1" in job.stderr
    assert "lost node1" not in job.stderr  # its node process goes on alone
    assert job.files_left() == []
    done = run([*_train(tmp_path, calm), "-np", "3"], tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    steps = _steps(struck, "step")
    assert steps == sorted(set(steps))  # each once, with one more where the job stopped to take the host back
    assert {*steps} >= {*_steps(calm, "step")}
    assert _steps(struck, "epoch") == _steps(calm, "epoch")
    weights, expected = (load_file(run / "model.safetensors") for run in (struck, calm))
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-9)


def _lose(bed: Bed, host: str) -> None:
    """Kill all processes of the job on a host, as if it had lost its power, but it can be reached again at once."""
    for process in bed.processes(host):
        if name_of(process) not in ("", "sshd"):
            kill(process.pid)


def _lose_hosts(bed: Bed, folder: Path, hosts: list[str], epochs: int, victims: list[str]) -> str:
    """Train on all hosts, of which some are lost in turn; check the result, and return what the job printed."""
    struck, calm = folder / "struck", folder / "calm"
    train = [word if word != "10" else str(epochs) for word in _train(folder, struck)]
    elastic = ["-H", ",".join(f"{host}:1" for host in hosts), f"--ssh-option={bed.ssh_options}"]
    elastic += ["--max-restarts", str(len(victims)), "--start-timeout", "120"]
    variables = ["env", f"PYTHONPATH={folder}", "OMP_NUM_THREADS=1"]
    with Job(bed, folder / "job", direct=[*variables, *train, *elastic]) as job:
        for number, victim in enumerate(victims):
            started = partial(_steps, struck, "run")
            job.wait_until(lambda number=number, started=started: len(started()) == number + 1, 120)
            job.wait_until(lambda started=started: max(_steps(struck, "step"), default=0) > started()[-1] + 8, 120)
            _lose(bed, victim)
        assert job.wait(240) == 0, job.stderr
        job.wait_for_end(10)
        printed = job.stdout
        stay = len(hosts) - 1
        said = [line for line in job.stderr.splitlines() if line.startswith("lockstep: restart ")]
        assert [f", with {len(hosts)} workers, of which {stay} stay" in line for line in said] == [True] * len(victims)
    assert job.files_left() == []
    done = run(
        [*train[: train.index("--run-dir") + 1], str(calm), "-np", str(len(hosts))],
        folder,
        own_environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    steps = _steps(struck, "step")
    assert steps == sorted({*steps})
    assert {*steps} >= {*_steps(calm, "step")}
    generations = [each for each in read_records(struck / "metrics.jsonl") if each["kind"] == "generation"]
    assert len(generations) == len(victims)
    assert all(each["repeated_steps"] <= 2 * INTERVAL for each in generations)
    weights, expected = (load_file(each / "model.safetensors") for each in (struck, calm))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    return printed


def test_workers_of_other_hosts_keep_their_processes(bed: Bed, tmp_path: Path) -> None:
    """Rank 0, the store and the records are on node1, which is lost first."""
    printed = _lose_hosts(bed, tmp_path, ["node1", "node2"], 10, ["node1", "node2"])
    first, second, third = (
        re.findall(r"^worker \d of 2: .* process (\d+),", start, re.MULTILINE)
        for start in printed.split("run folder")[:3]
    )
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, True]
    assert [one == other for one, other in zip(second, third, strict=True)] == [True, False]


SLOW_NET = """\
import os, time
from torch import nn

def wait(*_):
    if os.path.exists("../slow"):  # the job is not to finish before the spare is ready
        time.sleep(0.1)

def build(num_classes):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    net.register_forward_pre_hook(wait)
    return net
"""


@pytest.mark.long
def test_spare_host_is_prepared_and_steps_in(tmp_path: Path) -> None:
    with Bed(3) as bed:
        elastic = ["-H", "node1:1,node2:1,node3:1", f"--ssh-option={bed.ssh_options}", "--start-timeout", "120"]
        elastic += ["-np", "2", "--max-restarts", "1", "--spares", "1"]
        variables = ["env", f"PYTHONPATH={tmp_path}", "OMP_NUM_THREADS=1"]
        struck = tmp_path / "struck"
        train = _train(tmp_path, struck)
        (tmp_path / "net.py").write_text(SLOW_NET)
        (tmp_path / "slow").touch()
        with Job(bed, tmp_path / "job", direct=[*variables, *train, *elastic]) as job:
            job.wait_until(lambda: any(map(_is_preloaded, bed.processes("node3"))), 120)
            job.wait_until(lambda: max(_steps(struck, "step"), default=0) >= 4, 120)
            spare = [process.pid for process in bed.processes("node3") if _is_preloaded(process)]
            bed.link_down("node2")
            job.wait_until(lambda: len(_steps(struck, "run")) == 2, 120)
            assert [process.pid for process in bed.processes("node3") if _is_preloaded(process)] == spare
            (tmp_path / "slow").unlink()
            assert job.wait(240) == 0, job.stderr
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
