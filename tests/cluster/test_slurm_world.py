"""Workers in a real Slurm: steps on two nodes, batch scripts, MPI inside Slurm; nothing is set but what Slurm sets."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from slurm import Slurm

pytestmark = pytest.mark.cold  # on hosts of their own

PLACE = [
    sys.executable,
    "-c",
    "from lockstep.world.launcher_environment import RankInfo; print(RankInfo.from_environment())",
]
WORLD = """
import os, socket, torch
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect
own = RankInfo.from_environment()
with connect(own, "cpu") as world:
    total = world.sum_(torch.tensor([world.rank + 1.0])).item()
    said = [own.launcher, world.rank, own.local_rank, socket.gethostname(), os.environ["GLOO_SOCKET_IFNAME"], total]
    everyone = world.gather(said)
if world.is_main:
    print(everyone)
"""
HOROVOD = """
import torch
import lockstep.hvd as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
print([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), total])
"""


def _script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


def _places(printed: str) -> list[str]:
    return sorted(re.findall(r"RankInfo\(.*?\)", printed))


def test_a_step_on_two_nodes_meets_and_adds_up(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, _script(tmp_path, WORLD)], timeout=250)
    assert ast.literal_eval(done.stdout) == [
        ["Slurm", 0, 0, "hal01", "eth0", 3.0],
        ["Slurm", 1, 0, "hal02", "eth0", 3.0],
    ]


def test_horovods_api_in_a_step_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run(["srun", "-N2", "-n2", sys.executable, _script(tmp_path, HOROVOD)], timeout=250)
    said = sorted(ast.literal_eval(line) for line in done.stdout.splitlines())
    assert said == [[0, 2, 0, 1, 0, 2, 3.0], [1, 2, 0, 1, 1, 2, 3.0]]


@pytest.mark.parametrize(
    ("launcher", "mpirun"), [("Open MPI", "mpirun.openmpi --allow-run-as-root"), ("MPICH", "mpirun.mpich")]
)
def test_mpirun_in_a_job_on_two_nodes_meets_and_adds_up(
    launcher: str, mpirun: str, slurm: Slurm, tmp_path: Path
) -> None:
    command = f"#!/bin/sh\n{mpirun} -np 2 {sys.executable} {_script(tmp_path, WORLD)}\n"
    printed = slurm.sbatch(command, "-N2", "-n2", "--ntasks-per-node=1")
    assert ast.literal_eval(printed.splitlines()[-1]) == [
        [launcher, 0, 0, "hal01", "eth0", 3.0],
        [launcher, 1, 0, "hal02", "eth0", 3.0],
    ]


def test_batch_script_is_not_a_worker_but_its_uneven_steps_are(slurm: Slurm) -> None:
    python, _, code = PLACE
    one = f"{python} -c '{code}'"
    printed = slurm.sbatch(f"#!/bin/sh\n{one}\necho then\nsrun {one}\necho then\nsrun --mpi=pmi2 {one}\n", "-N2", "-n3")
    alone, plain, pmi2 = printed.split("then")
    assert _places(alone) == ["RankInfo(rank=0, size=1, local_rank=0, local_size=1, node=0, launcher='none')"]
    assert _places(plain) == [
        "RankInfo(rank=0, size=3, local_rank=0, local_size=2, node=0, launcher='Slurm')",
        "RankInfo(rank=1, size=3, local_rank=1, local_size=2, node=0, launcher='Slurm')",
        "RankInfo(rank=2, size=3, local_rank=0, local_size=1, node=1, launcher='Slurm')",
    ]
    assert _places(pmi2) == _places(plain)


def test_interactive_shells_are_no_workers(slurm: Slurm) -> None:
    python, _, code = PLACE

    def terminal(opening: str, before: str = "") -> str:
        """What a terminal shows when a shell that Slurm opens on a node runs PLACE."""
        shell = f"""{opening} sh -c '{before} {python} -c "{code}"; true'"""
        return slurm.run(["script", "-qec", shell, "/dev/null"], check=False).stdout.replace("\r", "")

    none = ["RankInfo(rank=0, size=1, local_rank=0, local_size=1, node=0, launcher='none')"]
    # What salloc itself runs (LaunchParameters=use_interactive_step).
    assert _places(terminal("salloc -N2 -n3 srun --interactive --preserve-env --pty")) == none
    assert _places(terminal("srun -N1 -n1 --pty")) == none
    shown = terminal("srun -N1 -n2 --pty")
    assert "this shell is one of 2 tasks of a Slurm step" in shown
    assert len(_places(terminal("srun -N1 -n1 -c2 --pty", before="srun --overlap -n2 -c1"))) == 2


def test_a_port_in_use_is_named(slurm: Slurm, tmp_path: Path) -> None:
    taken = 'import socket, time; s = socket.create_server(("", 29876)); time.sleep(1000)'
    script = _script(tmp_path, WORLD)
    command = f"#!/bin/sh\n{sys.executable} -c '{taken}' &\nsleep 1\nsrun -K {sys.executable} {script}\n"
    printed = slurm.sbatch(command, "-N2", "-n2", check=False, MASTER_PORT="29876")
    assert "port 29876 of hal01 (MASTER_PORT) is in use; set MASTER_PORT to a free one" in printed


def test_srun_and_lockstep_run_train_what_a_local_job_trains(slurm: Slurm, tmp_path: Path) -> None:
    train = [sys.executable, "-m", "lockstep", "train", "digits", "--epochs", "1", "--device", "cpu", "--run-dir"]
    local = slurm.run([*train, str(tmp_path / "local"), "-np", "2"], OMP_NUM_THREADS="1")
    assert "over 2 workers" in local.stdout
    slurm.run(["srun", "-N2", "-n2", *train, str(tmp_path / "srun")], timeout=250, OMP_NUM_THREADS="1")
    run = [sys.executable, "-m", "lockstep", "run", "--log-dir", str(tmp_path / "logs"), "--"]
    slurm.run(["salloc", "-N2", *run, *train, str(tmp_path / "run")], timeout=250, OMP_NUM_THREADS="1")
    weights = [_weights(tmp_path / name) for name in ("local", "srun", "run")]
    assert weights[0] == weights[1] == weights[2]


def _weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step-*")) / "model.safetensors").read_bytes()
