"""Workers that mpirun starts, with nothing else set: Open MPI 4 and MPICH from Debian, Open MPI 5 from PyPI."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest
from commands import MPICH, OPEN_MPI, OPEN_MPI_5, Command, Done, of_one_thread, run

SCRIPT = """
import os, psutil, torch
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect
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
if world.is_main:
    print(found)
"""
pytestmark = pytest.mark.cold


def _run(words: Command, script: Path, **variables: str) -> Done:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (Debian: openmpi-bin, mpich; .ci/run makes Open MPI 5)")
    return run([*words, "-np", "2", sys.executable, script], script.parent, of_one_thread(**variables))


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        ("Open MPI", OPEN_MPI, {}),
        ("Open MPI", OPEN_MPI_5, {}),
        ("MPICH", MPICH, {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29817"}),
    ],
    ids=["Open MPI", "Open MPI 5", "MPICH with a port"],
)
def test_workers_of_mpirun_meet_and_add_up(
    launcher: str, words: Command, variables: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = _run(words, script, **variables)
    assert done.returncode == 0, done.stderr
    found = ast.literal_eval(done.stdout)
    assert [[said[:5] for said in everyone] for everyone in found] == [
        [[launcher, 0, 0, 2, 3.0], [launcher, 1, 1, 2, 3.0]]
    ] * 3
    assert {ear for everyone in found for *_, ears in everyone for ear in ears} == {"127.0.0.1"}, "open beyond loopback"


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


def test_mpi4py_may_be_used_beside_horovod(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BESIDE_MPI)
    done = _run(OPEN_MPI, script, MPI4PY_MPIABI="openmpi")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[0, 1] [1.0, 1.0, 1.0] Open"


def test_rank_left_by_an_earlier_job_is_an_error_on_every_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lockstep.world.launcher_environment import RankInfo; RankInfo.from_environment()")
    done = _run(OPEN_MPI, script, RANK="3", WORLD_SIZE="4")
    assert done.returncode != 0
    assert "RANK=3, WORLD_SIZE=4 contradicts Open MPI, which started this worker as" in done.stderr


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
