"""How long does a job take from the loss of a worker to its next step?

    python benchmarks/recovery.py [ROUNDS]

Two or three workers with one thread each train a small network. After step 20, the last worker writes down the time and
is killed by SIGKILL. The reading is the time until the first worker has completed step 21: in a loop of one's own under
`lockstep run --max-restarts`, with `lockstep.survive`, so that the others keep their processes, and without, so that
all start again; and under hvd.elastic. In "two of three go on", the worker is lost with its host: its node process,
which was reached by a shell instead of ssh, is killed, too, and cannot be started again. Some kinds have a compiled
model, for any batch size; one also has a device whose context takes 2 s.

"lockstep train" is read from outside: from the kill to the record of the next step in metrics.jsonl, beside the seconds
in the job's own message.

The last table shows what `lockstep.survive` costs while no worker is lost, in steps of a ResNet-18. 40 minutes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
import lockstep.hvd as hvd
from lockstep.models.registry import build as build_model

STEP = 20  # after which the last worker is lost
KILLED, NEXT, STEPS = "killed", "next", "steps"  # files with times


class Kind(NamedTuple):
    survives: bool = True
    compiled: bool = False
    context_seconds: float = 0.0
    loses_host: bool = False
    elastic: bool = False
    loses: bool = True

    def command(self, workers: int) -> list[str]:
        if self.elastic:
            return ["horovodrun", "--min-np", "1", "-np", str(workers)]
        hosts = ["-H", "localhost:2,other:1", "--min-np", "2"] if self.loses_host else ["-np", str(workers)]
        return ["lockstep", "run", "--max-restarts", "1", *hosts]


KINDS = {
    "all start again": Kind(survives=False),
    "all start again, compiled": Kind(survives=False, compiled=True),
    "others stay": Kind(),
    "others stay, compiled": Kind(compiled=True),
    "two of three go on": Kind(loses_host=True),
    "all that is slow": Kind(True, True, context_seconds=2.0, loses_host=True),
    "hvd.elastic": Kind(elastic=True),
    "without survive": Kind(survives=False, loses=False),
    "with survive": Kind(loses=False),
}


def before_next(step: int, is_last: bool, folder: Path, loses_host: bool = False) -> None:
    """Lose the last worker, once, after its step."""
    if step == STEP and is_last and not (folder / KILLED).exists():
        this = psutil.Process()
        parents = [each for each in this.parents() if "lockstep.launch.node" in each.cmdline()]
        (folder / KILLED).write_text(str(time.time()))
        for process in parents if loses_host else ():
            process.kill()
        this.kill()


def completed(step: int, folder: Path) -> None:
    """Note the time of the first step after the loss."""
    if step == STEP + 1 and not (folder / NEXT).exists():
        (folder / NEXT).write_text(str(time.time()))


def build() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@cache
def make_data() -> TensorDataset:
    """Return the data set, which a process makes once."""
    return TensorDataset(torch.randn(6000, 64), torch.randint(0, 10, (6000,)))


@cache
def make_context(seconds: float) -> None:
    """Stand in for a device's context, which a process makes once."""
    time.sleep(seconds)


def own_loop(folder: Path, kind: Kind) -> None:
    make_context(kind.context_seconds)
    world = lockstep.connect("cpu")
    model = world.prepare(build())
    compiled = torch.compile(model, dynamic=True) if kind.compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = world.loader(make_data(), global_batch=60)
    run = world.run(folder / "run", loader=train, log_every=1, model=model, optimizer=optimizer)
    for _ in run.epochs(1):
        for inputs, labels in train:
            before_next(run.step_count, world.rank == world.size - 1, folder, kind.loses_host)
            optimizer.zero_grad()
            run.backward(F.cross_entropy(compiled(inputs), labels))
            optimizer.step()
            run.step()
            completed(run.step_count, folder)


def undisturbed(folder: Path) -> None:
    """Train a ResNet-18 on 32 x 32 noise; note the seconds of each step."""
    torch.set_num_threads(1)
    world = lockstep.connect("cpu")
    model = world.prepare(build_model("resnet18", 10, 3, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train = world.loader(TensorDataset(torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)), global_batch=16)
    run = world.run(folder / "run", loader=train, checkpoint_epochs=0, model=model, optimizer=optimizer)
    times = []
    for _ in run.epochs(STEP):
        for inputs, labels in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
            run.step()
            times.append(time.perf_counter())
    if world.is_main:
        (folder / STEPS).write_text(" ".join(str(end - begin) for begin, end in pairwise(times)))


def elastic(folder: Path) -> None:
    net, data = build(), make_data()
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


def start(name: str, workers: int) -> dict[str, float]:
    """Run a job; return the seconds to the step after the loss, or those of a step."""
    kind = KINDS[name]
    with TemporaryDirectory() as text:
        folder = Path(text)
        shell = folder / "bin" / "ssh"
        shell.parent.mkdir()
        shell.write_text(f'#!/bin/sh\n[ -e {folder / KILLED} ] && exit 255\nfor last; do :; done\nexec sh -c "$last"\n')
        shell.chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{shell.parent}:{os.environ['PATH']}"}
        launcher, *options = kind.command(workers)
        program = [sys.executable, __file__, name, text]
        command = [str(Path(sys.executable).with_name(launcher)), *options, *program]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not (folder / (NEXT if kind.loses else STEPS)).exists():
            sys.exit(f"{name}: not completed: {done.stdout}{done.stderr}")
        if not kind.loses:
            return {"step": median(map(float, (folder / STEPS).read_text().split()))}
        killed, following = (float((folder / name).read_text()) for name in (KILLED, NEXT))
        return {"to the next step": following - killed}


def start_trainer(workers: int) -> dict[str, float]:
    """Kill a worker of `lockstep train digits` after 60 steps; return the seconds until its next record of a step."""
    with TemporaryDirectory() as text:
        metrics = Path(text) / "run" / "metrics.jsonl"
        options = f"-np {workers} --device cpu --max-restarts 1 --log-every 1 --epochs 5 --run-dir {metrics.parent}"
        command = [str(Path(sys.executable).with_name("lockstep")), "train", "digits", *options.split()]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as job:
            while job.poll() is None and not (metrics.exists() and metrics.read_text().count('"kind": "step"') >= 60):
                time.sleep(0.01)
            processes = psutil.Process(job.pid).children(recursive=True)
            last = max(process.pid for process in processes if "train" in process.cmdline())
            killed = time.time()
            os.kill(last, signal.SIGKILL)
        if job.returncode != 0:
            sys.exit(f"lockstep train: exit code {job.returncode}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        [generation] = [record for record in records if record["kind"] == "generation"]
        steps = [record for record in records if record["kind"] == "step" and record["unix_time"] > killed]
        following = min(step["unix_time"] for step in steps if step["step"] == generation["step"])
        return {"to the next step": following - killed, "by the message": generation["seconds"]}


def main() -> None:
    # Not imported by the programs, which it would slow down.
    from harness import Bar, argument, rounds
    from readings import compare_readings

    count = argument("rounds", rounds, 20)
    contestants = {
        f"{name}, {workers} workers": partial(start, name, workers)
        for name, kind in KINDS.items()
        for workers in (2, 3)
        if kind.loses and not kind.loses_host
    }
    compare_readings("recovery: loss of a worker", contestants, {}, "seconds", count)
    contestants = {f"lockstep train, {workers} workers": partial(start_trainer, workers) for workers in (2, 3)}
    compare_readings("recovery: lockstep train", contestants, {}, "seconds", count)
    contestants = {name: partial(start, name, 3) for name, kind in KINDS.items() if kind.loses_host}
    bars = {("to the next step", "all that is slow"): Bar("at most", 1.2)}
    compare_readings("recovery: loss of a host", contestants, bars, "seconds", count)
    contestants = {name: partial(start, name, 2) for name, kind in KINDS.items() if not kind.loses}
    bars = {("step", "with survive"): Bar("at most", 1.01)}
    compare_readings("recovery: no loss", contestants, bars, "seconds", count)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        kind, folder = KINDS[sys.argv[1]], Path(sys.argv[2])
        if kind.elastic:
            elastic(folder)
        else:
            work = partial(own_loop, folder, kind) if kind.loses else partial(undisturbed, folder)
            if kind.survives:
                lockstep.survive(work)
            else:
                work()
    else:
        main()
