"""What is observed under which launcher: each row of the table in docs/reference/launchers.md is a job here.

A job's rank 1 has another learning rate, is slow until rank 0 has a record that names it, and then hangs. The short
form has a row of each way to observe: by the launcher, by a flag, by a variable.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import (
    HOROVODRUN,
    INTEL_MPI,
    LOCKSTEP,
    MPICH,
    OPEN_MPI,
    TORCHRUN,
    Command,
    Done,
    of_one_thread,
    run,
    run_together,
    write_shims,
)
from ports import free_port
from time_limits import scaled

from lockstep.files.jsonl import read_records

PAGE = Path(__file__).parents[2] / "docs/reference/launchers.md"
PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(rank, size, ending):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model, slow = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)), torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01 + rank / 100)
    batches, steps = DataLoader(TensorDataset(torch.randn(800, 8)), 8), 0
    while slow:
        for x, in batches:
            optimizer.zero_grad()
            loss = model(x).mean()
            time.sleep(0.02 if rank == 1 else 0.0)
            loss.backward()
            optimizer.step()
            steps += 1
        if rank == 0 and os.path.exists("steps/metrics.jsonl"):
            slow[0] = float('"straggler"' not in open("steps/metrics.jsonl").read())
        dist.all_reduce(slow, op=dist.ReduceOp.MIN)
    sys.stdout.write(f"trained {rank} {steps}\\n")  # at once: ranks may share the stream
    sys.stdout.flush()
    if ending == "hang" and rank == 1:
        time.sleep(10_000)
    dist.barrier()
    dist.destroy_process_group()

def start(rank, *arguments):
    train(rank, *arguments)

if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(start, (2, sys.argv[2]), nprocs=2)
    else:
        from lockstep.world.launcher_environment import RankInfo

        own = RankInfo.from_environment()
        train(own.rank, own.size, sys.argv[2])
"""
MPIS = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "Intel MPI": INTEL_MPI}
OBSERVED = ("-m", "lockstep.observe", "--dir", "steps")
ROWS = {
    "`lockstep run`": (*LOCKSTEP, "run", "-np", "2", "--observe-dir", "steps", "--", sys.executable),
    "`lockstep run --nodes`": (),
    "`horovodrun`": (*HOROVODRUN, "-np", "2", sys.executable),
    "torchrun": (*TORCHRUN, *OBSERVED),
    "Open MPI": (*OPEN_MPI, "-n", "2", "python"),
    "MPICH": (*MPICH, "-n", "2", "python"),
    "Intel MPI": (*INTEL_MPI, "-n", "2", "python"),
    "srun": ("srun", "-N2", "-n2", sys.executable),
    "`mp.spawn`": (sys.executable, *OBSERVED),
}
SEVERAL_HOSTS = ("`lockstep run --nodes`", "srun")
SHORT = ("`lockstep run --nodes`", "torchrun", "Open MPI")
BY_FLAG = ("`lockstep run`", "`lockstep run --nodes`", "torchrun", "`mp.spawn`")  # others: by LOCKSTEP_OBSERVE


def _run(row: str, folder: Path, request: pytest.FixtureRequest, ending: str = "hang") -> Done:
    (folder / "program.py").write_text(PROGRAM)
    words = ("program.py", "spawn" if "spawn" in row else "worker", ending)
    variables = {"LOCKSTEP_HANG_TIMEOUT": f"{scaled(3)}", "LOCKSTEP_STRAGGLER_SECONDS": "0.5"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {} if row in BY_FLAG else {"LOCKSTEP_OBSERVE": "steps"}
    if row == "srun":
        slurm = request.getfixturevalue("slurm")
        variables["MASTER_ADDR"] = slurm.nodes[0]
        command = [*ROWS[row], *map(str, (folder / words[0], *words[1:]))]
        return slurm.run(["srun", f"--chdir={folder}", *command[1:]], check=False, **variables)
    if "--nodes" in row:
        return _run_nodes(folder, words, variables)
    if row in MPIS:
        if shutil.which(ROWS[row][0]) is None:
            pytest.skip(f"needs {ROWS[row][0]} (Debian: openmpi-bin, mpich; .ci/run makes Intel MPI of PyPI)")
        write_shims(folder / "shims", "python")
        variables["PATH"] = f"{folder / 'shims'}:{os.environ['PATH']}"
    return run([*ROWS[row], *words], folder, of_one_thread(**variables))


def _run_nodes(folder: Path, words: tuple[str, ...], variables: dict[str, str]) -> Done:
    port = variables.pop("MASTER_PORT")
    del variables["MASTER_ADDR"]
    where = ("--master-addr", "127.0.0.1", "--master-port", port, "-np", "1")
    commands: list[Command] = [
        [*LOCKSTEP, "run", "--nodes", "2", "--node-rank", str(node), *where, *flags, "--", sys.executable, *words]
        for node, flags in enumerate((("--observe-dir", "steps"), ()))
    ]
    return run_together(commands, folder, of_one_thread(**variables))[0]


def _marks(row: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.cold] * (row == "srun") + [pytest.mark.long] * (row not in SHORT)


@pytest.mark.parametrize("row", [pytest.param(row, marks=_marks(row)) for row in ROWS])
def test_each_launcher_has_what_the_table_says(row: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    done = _run(row, tmp_path, request)
    text = done.stdout + done.stderr
    assert text.count("trained") == 2, text
    assert done.returncode, text
    _check_records(tmp_path, text)
    host = r" \(\w+.*\)" if row in SEVERAL_HOSTS else ""
    assert len(re.findall(rf"lockstep: rank 1{host} slows all others down: .* in the forward pass", text)) == 1, text
    assert text.count("settings of their optimizers differ (learning rates 0.01, 0.02)") == 1, text
    assert re.search(r"lockstep: rank 1 .*has not entered .*; rank 0 has waited for it for", text), text
    assert re.search(r"lockstep: rank 1 is in user code, at program.py:\d+ in train", text), text


def _check_records(folder: Path, text: str) -> None:
    records = list(read_records(folder / "steps/metrics.jsonl"))
    found = {each["kind"]: each for each in records}
    assert found["run"]["workers"] == 2
    assert "the settings of their optimizers differ" in found["finding"]["text"]
    assert (found["straggler"]["ranks"], found["straggler"]["phase"]) == ([1], "forward")
    assert {"forward", "backward", "reduction"} <= {*found["step"]["phase_seconds"]}
    assert found["step"]["images_per_second"] > 0


@pytest.mark.parametrize(
    "row", ["torchrun", *(pytest.param(row, marks=pytest.mark.long) for row in ("Open MPI", "`mp.spawn`"))]
)
def test_the_last_steps_are_recorded(row: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    done = _run(row, tmp_path, request, ending="end")
    assert done.returncode == 0, done.stderr
    (steps,) = {int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("trained")}
    last = list(read_records(tmp_path / "steps/metrics.jsonl"))[-1]
    assert (last["kind"], last["exit_code"], last["step"]) == ("end", 0, steps)
    printed = [line for line in done.stderr.splitlines() if line.startswith("lockstep: ")]
    assert len(printed) == 2, done.stderr  # the weights that differ, and the slow rank


def test_the_page_has_each_row() -> None:
    table = PAGE.read_text().partition("## What is observed")[2].partition("\n## ")[0]
    rows = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")}
    assert {*ROWS} <= rows
