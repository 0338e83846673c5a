"""Work that begins again in the processes that are left when a worker is lost: `lockstep.survive`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import LOCKSTEP, Done, own_environment, run
from safetensors.torch import load_file

import lockstep
from lockstep.files.jsonl import read_records

# A run of 12 steps of 3 workers, of which one is lost in some moment, once, when the folder has no file "lost".
LOOP = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
import lockstep

folder, moment, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
data = torch.utils.data.TensorDataset(torch.randn(96, 4, generator=torch.Generator().manual_seed(0)))

def lose(now, rank):
    name = now.partition(":")[0] + "-lost"
    if moment.split("+").count(now) and rank == victim and not (folder / name).exists():
        (folder / name).touch()
        os.kill(os.getpid(), signal.SIGKILL)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        if index == 50 and torch.utils.data.get_worker_info() and (folder / "in-loader").exists():
            (folder / "in-loader").unlink()
            os.kill(os.getppid(), signal.SIGKILL)
        return data[index]

slow = Slow()

def main():
    world = lockstep.connect("cpu")
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    lose(f"begin:{generation}", world.rank)
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    model = world.prepare(net.double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    train = world.loader(slow, global_batch=24, shuffle=True, num_workers=int(moment == "loader"))
    run = world.run(folder / "run", loader=train, model=model, optimizer=optimizer, schedule=schedule, log_every=2,
                    checkpoint_steps=3)
    print(f"\\nG{generation} rank {world.rank} pid {os.getpid()} step {run.step_count}", flush=True)
    for epoch in run.epochs(3):
        for (inputs,) in train:
            if run.step_count == 6:
                lose("forward", world.rank)
            optimizer.zero_grad()
            loss = model(inputs.double()).square().mean()
            run.backward(loss)
            optimizer.step()
            if run.step_count == 6:
                lose("update", world.rank)
            run.step(loss=loss)
            schedule.step()
            if run.step_count == 7:
                lose("step", world.rank)
        if epoch == 1:
            lose("evaluation", world.rank)
        world.mean(run.step_count)
    if moment == "error" and world.rank == 1:
        raise KeyError("of the program")
    world.barrier()

lockstep.survive(main)
"""


def _run(folder: Path, moment: str, victim: int = 1, restarts: int = 2, flags: tuple[str, ...] = ()) -> Done:
    folder.mkdir(exist_ok=True)
    if moment == "loader":
        (folder / "in-loader").touch()
    (folder / "loop.py").write_text(LOOP)
    program = [sys.executable, folder / "loop.py", folder, moment, str(victim)]
    flags = ("-np", "3", "--max-restarts", str(restarts), *flags)
    return run([*LOCKSTEP, "run", *flags, "--", *program], folder, own_environment(OMP_NUM_THREADS="1"))


def _began(done: Done) -> list[list[tuple[int, int]]]:
    """By generation, the process and the first step of each rank."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("G"):
            generation, _, rank, _, pid, _, step = line.removeprefix("G").split()
            found.setdefault(int(generation), {})[int(rank)] = int(pid), int(step)
    return [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(found.items())]


def _result(folder: Path) -> tuple[dict[str, torch.Tensor], list[int]]:
    newest = max((folder / "run/checkpoints").glob("step-*"))
    tensors = {
        f"{path.name} {name}": each for path in newest.glob("*.safetensors") for name, each in load_file(path).items()
    }
    return tensors, [each["step"] for each in read_records(folder / "run/metrics.jsonl") if each["kind"] == "step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], list[int]]:
    folder = tmp_path_factory.mktemp("calm")
    done = _run(folder, "never")
    assert done.returncode == 0, done.stderr
    return _result(folder)


# In a forward pass, before an update that another has done, in an evaluation, by a loader process.
# Worker 0 writes: if it is lost, the newest snapshot and the newest checkpoint (of steps 3, 6, ...) may be incomplete.
@pytest.mark.parametrize(
    ("moment", "victim", "earliest"),
    [
        ("forward", 0, 3),
        ("loader", 1, 0),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("update", 1, 6), ("evaluation", 0, 4))),
    ],
)
def test_others_keep_their_processes_and_take_the_same_steps(
    tmp_path: Path, undisturbed: Any, moment: str, victim: int, earliest: int
) -> None:
    done = _run(tmp_path, moment, victim)
    assert done.returncode == 0, done.stderr
    first, second = _began(done)
    moved = [rank for rank in range(3) if first[rank][0] != second[rank][0]]
    assert len(moved) == 1
    assert moment == "loader" or moved == [victim]
    assert {step for _, step in second} == {second[0][1]}
    assert second[0][1] >= earliest
    tensors, steps = _result(tmp_path)
    expected, expected_steps = undisturbed
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert steps == expected_steps


def test_second_loss_while_the_others_begin_again_is_survived(tmp_path: Path, undisturbed: Any) -> None:
    done = _run(tmp_path, "forward+begin:1", victim=1)
    assert done.returncode == 0, done.stderr
    began = _began(done)
    assert began[0][0][0] == began[-1][0][0]
    assert began[0][2][0] == began[-1][2][0]
    assert began[-1][0][1] == 6
    tensors, _ = _result(tmp_path)
    assert all(torch.equal(tensors[name], each) for name, each in undisturbed[0].items())


def test_programs_own_error_ends_the_job(tmp_path: Path) -> None:
    done = _run(tmp_path, "error", restarts=1)
    assert done.returncode == 1
    assert "KeyError: 'of the program'" in done.stderr
    assert "not restarting again: --max-restarts 1" in done.stderr


def test_without_a_launcher_it_is_a_call() -> None:
    assert lockstep.survive(lambda: 5) == 5
    with pytest.raises(RuntimeError, match="mine"):
        lockstep.survive(_fail)


def _fail() -> None:
    raise RuntimeError("mine")


# Rank 1 is lost while the others create their process group.
JOINING = """
import os, signal, time
from pathlib import Path
import lockstep
from lockstep.diagnosis import board

def main():
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        folder = Path(os.environ["LOCKSTEP_PROGRESS"])
        while sum(bool(each.read().flags & board.JOINING) for each in board.boards_in(folder)) < 2:
            time.sleep(0.01)
        time.sleep(0.5)  # in which torch names the group
        os.kill(os.getpid(), signal.SIGKILL)
    print("connected", lockstep.connect("cpu").mean(1.0), flush=True)

lockstep.survive(main)
"""


def test_worker_lost_while_the_others_connect_is_replaced(tmp_path: Path) -> None:
    flags = ("--json", "-np", "3", "--max-restarts", "1", "--hang-timeout", "20")
    done = run([*LOCKSTEP, "run", *flags, "--", sys.executable, "-c", JOINING], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lockstep: restart 1 of 1, with 3 workers, of which 2 stay" in done.stderr
    assert done.stderr.count("connected 1.0") == 3
    end = json.loads(done.stdout)
    assert (end["exit_code"], end["cause"], end["workers"], end["restarts"]) == (0, None, 3, 1)


# Rank 1 does not take part and does not end: as a host that is cut off.
CUT_OFF = """
import os, threading, time
import torch
import lockstep
from lockstep.world.generations import connections

world = lockstep.connect("cpu")
if world.rank == 1:
    time.sleep(60)
threading.Timer(0.5, connections.shut_down).start()
try:
    world.sum_(torch.ones(1000))
except RuntimeError:
    print("interrupted", flush=True)
os._exit(9)
"""


def test_collective_that_waits_for_a_lost_host_is_interrupted(tmp_path: Path) -> None:
    done = run([*LOCKSTEP, "run", "-np", "2", "--", sys.executable, "-c", CUT_OFF], tmp_path)
    assert done.returncode == 9
    assert "interrupted" in done.stdout
