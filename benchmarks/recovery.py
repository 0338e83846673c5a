"""How long does a job take from the loss of a worker to its next step?

    python benchmarks/recovery.py [ROUNDS]

Two or three workers with one thread each train a small network. After step 20, the last worker writes down the time and
is killed by SIGKILL. The reading is the time until the first worker has completed step 21: in a loop of one's own under
`lockstep run --max-restarts`, with `lockstep.survive`, so that the others keep their processes, and without, so that
all start again; and under hvd.elastic. Two kinds have a compiled model. About 20 minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import argument, rounds
from readings import compare_readings
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
import lockstep.hvd as hvd

STEP = 20  # after which the last worker is lost
KILLED, NEXT = "killed", "next"
RUN = ["lockstep", "run", "--max-restarts", "1", "-np"]
LAUNCHERS = {
    "own loop, all start again": RUN,
    "own loop, all start again, compiled": RUN,
    "own loop": RUN,
    "own loop, compiled": RUN,
    "hvd.elastic": ["horovodrun", "--min-np", "1", "-np"],
}


def before_next(step: int, is_last: bool, folder: Path) -> None:
    """Lose the last worker, once, after its step."""
    if step == STEP and is_last and not (folder / KILLED).exists():
        (folder / KILLED).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def completed(step: int, folder: Path) -> None:
    """Note the time of the first step after the loss."""
    if step == STEP + 1 and not (folder / NEXT).exists():
        (folder / NEXT).write_text(str(time.time()))


def build() -> tuple[nn.Module, TensorDataset]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, TensorDataset(torch.randn(6000, 64), torch.randint(0, 10, (6000,)))


def own_loop(folder: Path, compiles: bool) -> None:
    net, data = build()
    world = lockstep.connect("cpu")
    model = world.prepare(net)
    compiled = torch.compile(model) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = world.loader(data, global_batch=60)
    run = world.run(folder / "run", loader=train, log_every=1, model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for inputs, labels in train:
            before_next(run.step_count, world.rank == world.size - 1, folder)
            optimizer.zero_grad()
            run.backward(F.cross_entropy(compiled(inputs), labels))
            optimizer.step()
            run.step()
            completed(run.step_count, folder)


def elastic(folder: Path) -> None:
    net, data = build()
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.step < 2 * STEP:
            before_next(state.step, hvd.rank() == hvd.size() - 1, folder)
            inputs, labels = data[state.step * 20 : state.step * 20 + 20]
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            completed(state.step, folder)

    train(hvd.elastic.TorchState(net, optimizer, step=0))


def lose_a_worker(kind: str, workers: int) -> dict[str, float]:
    with TemporaryDirectory() as name:
        folder, environment = Path(name), {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher, *options = LAUNCHERS[kind]
        program = [sys.executable, __file__, kind, name]
        command = [str(Path(sys.executable).with_name(launcher)), *options, str(workers), *program]
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
        if not (folder / NEXT).exists():
            sys.exit(f"{kind}: no step after the loss: {done.stdout}{done.stderr}")
        killed, following = (float((folder / name).read_text()) for name in (KILLED, NEXT))
        return {"to the next step": following - killed}


def main(count: int) -> None:
    kinds = [(kind, workers) for kind in LAUNCHERS for workers in (2, 3)]
    contestants = {f"{kind}, {workers} workers": partial(lose_a_worker, kind, workers) for kind, workers in kinds}
    compare_readings("recovery: loss of a worker", contestants, {}, "seconds", count)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        kind, folder = sys.argv[1], Path(sys.argv[2])
        loop = partial(own_loop, folder, kind.endswith("compiled"))
        if kind == "hvd.elastic":
            elastic(folder)
        elif "all start again" in kind:
            loop()
        else:
            lockstep.survive(loop)
    else:
        main(argument("rounds", rounds, 20))
