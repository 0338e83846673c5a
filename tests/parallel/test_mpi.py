"""Workers that mpirun starts, with nothing else set: Open MPI and MPICH from Debian."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, psutil, torch
from lockstep.place import Place
from lockstep.world import connect
inherited = {each.laddr for each in psutil.Process().net_connections("inet")}
for _ in range(2):  # a second connection does not meet the first one's addresses
    with connect(Place.from_environment(), "cpu") as world:
        total = world.sum_(torch.tensor([world.rank + 1.0])).item()
        sockets = [each for each in psutil.Process().net_connections("inet") if each.laddr not in inherited]
        ears = sorted({each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN})
        said = [world.place.launcher, world.rank, world.place.local_rank, world.size, total, ears]
        everyone = world.gather(said)
if world.is_main:
    print(everyone)
"""
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]


def _run(words: list[str], script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    if shutil.which(words[0]) is None:
        pytest.skip(f"needs {words[0]} (Debian: openmpi-bin, mpich)")
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return subprocess.run(
        [*words, "-np", "2", sys.executable, str(script)],
        env={**kept, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize(
    ("launcher", "words", "variables"),
    [
        ("Open MPI", OPEN_MPI, {}),
        ("MPICH", ["mpirun.mpich"], {}),
        ("MPICH", ["mpirun.mpich"], {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "29817"}),
    ],
    ids=["Open MPI", "MPICH", "MPICH with a port"],
)
def test_workers_of_mpirun_meet_and_add_up(
    launcher: str, words: list[str], variables: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = _run(words, script, **variables)
    assert done.returncode == 0, done.stderr
    everyone = ast.literal_eval(done.stdout)
    assert [said[:5] for said in everyone] == [[launcher, 0, 0, 2, 3.0], [launcher, 1, 1, 2, 3.0]]
    assert {ear for *_, ears in everyone for ear in ears} == {"127.0.0.1"}, "a port is open beyond loopback"


def test_a_rank_that_an_earlier_job_left_is_an_error_on_every_worker(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lockstep.place import Place; Place.from_environment()")
    done = _run(OPEN_MPI, script, RANK="3", WORLD_SIZE="4")
    assert done.returncode != 0
    assert "RANK=3, WORLD_SIZE=4 cannot be: Open MPI has started this as worker" in done.stderr
