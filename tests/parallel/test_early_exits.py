"""A worker that exits with code 0 while others need it is a loss; one that has done its work is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import HOROVODRUN, LOCKSTEP, Done, own_environment, run

# Ten steps of three workers. At step 5 rank 1 exits with code 0: by itself, or by its handler of a signal. With
# "once", its successor goes on.
SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
import lockstep
import lockstep.hvd as hvd

engine, way = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

def leave(rank, step):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if (rank, step) == (1, 5) and (first or "once" not in way):
        if "signal" in way:
            os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(0)

def steps(rank, total):
    for step in range(10):
        leave(rank, step)
        total(torch.ones(3))

def elastic():
    hvd.init()
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 10:
            leave(hvd.rank(), state.step)
            hvd.allreduce(torch.ones(3), name="total")
            state.step += 1
            state.commit()

    train(state)

def survive():
    world = lockstep.connect("cpu")
    steps(world.rank, world.sum_)

if engine == "ddp":
    dist.init_process_group("gloo")
    steps(dist.get_rank(), dist.all_reduce)
elif engine == "hvd":
    hvd.init()
    steps(hvd.rank(), hvd.allreduce)
elif engine == "elastic":
    elastic()
else:
    lockstep.survive(survive)
print("done", os.environ["RANK"], flush=True)
"""
LEFT = "exited with code 0 while others still needed it (an early sys.exit() or return, or fewer batches?)"


def _run(folder: Path, engine: str, way: str, *command: str) -> Done:
    (folder / "script.py").write_text(SCRIPT)
    script = [sys.executable, folder / "script.py", engine, way]
    return run([*command, *script], folder, own_environment(OMP_NUM_THREADS="1"))


@pytest.mark.parametrize(("engine", "way"), [("elastic", "exit once"), ("survive", "signal once")])
def test_worker_that_exits_early_is_replaced(tmp_path: Path, engine: str, way: str) -> None:
    done = _run(tmp_path, engine, way, *LOCKSTEP, "run", "-np", "3", "--max-restarts", "1", "--")
    assert done.returncode == 0, done.stderr
    assert f"lockstep: worker 1 of 3 {LEFT}; 2 of the others stay" in done.stderr
    assert "lockstep: restart 1 of 1, with 3 workers, of which 2 stay" in done.stderr
    assert all(f"done {rank}\n" in done.stdout for rank in range(3))


@pytest.mark.parametrize(
    ("engine", "way", "command", "trace"),
    [
        # The others wait 10 s for the launcher's message.
        pytest.param("elastic", "exit", [*LOCKSTEP, "run"], "", marks=pytest.mark.long),
        ("ddp", "signal", [*LOCKSTEP, "run"], "RuntimeError: "),
        ("hvd", "exit", HOROVODRUN, "because rank 1 called hvd.shutdown(), or its script ended"),
    ],
)
def test_job_fails_and_names_the_worker_that_exited_early(
    tmp_path: Path, engine: str, way: str, command: list[str], trace: str
) -> None:
    done = _run(tmp_path, engine, way, *command, "-np", "3")
    assert done.returncode == 1, done.stderr
    assert f"lockstep: worker 1 of 3 {LEFT}; the others were stopped" in done.stderr
    assert trace in done.stderr
    assert "done" not in done.stdout


# Each worker does its work, and rank 0 has more to do after all others have exited.
LONGER = """
import os, sys, time
from pathlib import Path
import psutil

rank, engine = os.environ["RANK"], sys.argv[1]
Path(f"pid-{rank}").write_text(f"{os.getpid()}")
if engine == "ddp":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(3))
    dist.barrier()
if engine == "elastic":
    import lockstep.hvd as hvd
    hvd.init()
    state = hvd.elastic.TorchState(step=0)
    hvd.elastic.run(lambda state: state.commit())(state)
while rank == "0" and len(pids := list(Path().glob("pid-[12]"))) < 2:
    time.sleep(0.01)
while rank == "0" and any(psutil.pid_exists(int(pid.read_text() or 1)) for pid in pids):
    time.sleep(0.01)
print("done", rank, flush=True)
"""


@pytest.mark.parametrize("engine", ["ddp", "elastic"])
def test_worker_may_work_on_when_the_others_have_finished(tmp_path: Path, engine: str) -> None:
    (tmp_path / "script.py").write_text(LONGER)
    command = [*LOCKSTEP, "run", "-np", "3", "--max-restarts", "1", "--", sys.executable, "script.py", engine]
    done = run(command, tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 3
    assert "restart" not in done.stderr


# Rank 0's first attempt to save what has been trained fails after the others have exited.
SAVES = """
import os, time
from pathlib import Path
import psutil
import lockstep.hvd as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)

@hvd.elastic.run
def train(state):
    while state.step < 3:
        state.step += 1
        print(f"step {state.step} of rank {hvd.rank()}", flush=True)
        state.commit()

rank, pids = hvd.rank(), hvd.allgather_object(os.getpid())
train(state)
while rank == 0 and any(psutil.pid_exists(pid) for pid in pids[1:]):
    time.sleep(0.01)
if rank == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise OSError("no space left")
"""


def test_failure_after_the_last_step_loses_the_commit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES)
    command = [*LOCKSTEP, "run", "-np", "2", "--max-restarts", "1", "--", sys.executable, "script.py"]
    done = run(command, tmp_path, own_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    assert "OSError: no space left" in done.stderr
    assert "lockstep: no worker that had the last commit is left: the script starts again without it" in done.stderr
    assert done.stdout.count("step 1 of rank") == 4
