"""Kill workers of training runs at random moments.

Each job is first trained without kills. Then the same job runs with restarts, and random workers are killed (SIGKILL),
mostly during training, sometimes while workers start. The others must keep their processes once they train. At the end,
weights, optimizer state, evaluations and mean losses of the steps must be bit-identical, each step must be recorded
once and in order, no kill may have repeated more recorded steps than one snapshot interval (two if it prevented a
snapshot), and no process or file in /dev/shm may remain.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from commands import LOCKSTEP, Job, run, started
from safetensors.torch import load_file
from time_limits import LIMIT_SECONDS, wait_until

from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.world import SNAPSHOTS

SNAPSHOT_STEPS = 5
FP64_SNAPSHOT_STEPS = 4
JOB_SECONDS = 4 * LIMIT_SECONDS
AT_START = 0.15  # fraction of the kills while workers start
COMMON = ("--checkpoint-epochs", "5", "-p", str(SNAPSHOT_STEPS), "--io-every", "0", "--track")
JOBS = {
    "ddp": ("-np", "2"),
    "horovod": ("-np", "2", "--strategy", "horovod", "--optimizer", "adam", "--lr", "0.001"),
    "average": ("-np", "3", "--ema-decay", "0.99", "--accumulate", "2", "-b", "20"),
    "sharded": ("-np", "2", "--shard-optimizer", "--optimizer", "adamw", "--lr", "0.001", "--compress", "powersgd"),
}


NET = """\
import os, time
from torch import nn

def wait(*arguments):
    if os.path.exists({slow!r}):
        time.sleep(0.15)

def build(num_classes):
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, num_classes))
    net.register_forward_pre_hook(wait)
    return net
"""


def fp64_training(folder: Path, run: Path, *words: str, epochs: int = 12) -> list[str]:
    """Return a command that trains a small network in fp64, whose steps take long while `folder / "slow"` exists."""
    (folder / "net.py").write_text(NET.format(slow=str(folder / "slow")))
    train = f"train digits -a net:build -b 20 --epochs {epochs} --precision fp64 --checkpoint-epochs 0 --io-every 0"
    train += f" -p {FP64_SNAPSHOT_STEPS} --track"
    return [*LOCKSTEP, *train.split(), "--run-dir", str(run), *words]


@dataclass
class Outcome:
    """The outcome of a job with kills; `breaches`, the failed checks, should be empty.

    `struck_at` has, for each kill, the newest recorded step and how often training had started before. `memory` has the
    snapshot folders that the workers reported.
    """

    kills: int = 0
    struck_at: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    memory: set[str] = field(default_factory=set)
    breaches: list[str] = field(default_factory=list)


def command(words: Sequence[str], run: Path, epochs: int, restarts: int = 0) -> list[str]:
    train = [*LOCKSTEP, "train", "digits", "--run-dir", str(run), "--epochs", str(epochs)]
    return [*train, *words, *COMMON, *(["--max-restarts", str(restarts)] if restarts else [])]


def disturb(
    words: Sequence[str], folder: Path, epochs: int, kills: int, chance: random.Random, apart: float = 1.5
) -> Outcome:
    """Train a job without and with kills, each up to `apart` seconds after training has started, and compare."""
    outcome = Outcome()
    calm, struck = folder / "calm", folder / "struck"
    folder.mkdir(exist_ok=True)
    done = run(command(words, calm, epochs), folder, timeout=JOB_SECONDS)
    assert done.returncode == 0, done.stderr
    with started(command(words, struck, epochs, restarts=kills), folder) as job:
        while outcome.kills < kills and strike(job, struck, outcome, chance, apart):
            pass
        code = job.wait(JOB_SECONDS)
    if code:
        outcome.breaches.append(f"exit code {code}: {job.text[-800:]}")
        return outcome
    starts = starts_of(struck)
    outcome.repeated = [step - starts[begun] for step, begun in outcome.struck_at if begun < len(starts)]
    if outcome.repeated and max(outcome.repeated) > 2 * SNAPSHOT_STEPS:
        outcome.breaches.append(f"{max(outcome.repeated)} recorded steps were taken again")
    outcome.breaches += [*differences(calm, struck), *leftovers(struck, outcome.memory)]
    return outcome


def strike(job: Job, run: Path, outcome: Outcome, chance: random.Random, apart: float) -> bool:
    """Kill one worker at a random moment; return False if the job exited first."""
    at_start = chance.random() < AT_START
    wait_until(lambda: job.poll() is not None or bool(job.workers()))
    if not at_start:
        wait_until(lambda: job.poll() is not None or all_train(run))
    time.sleep(chance.uniform(0.0, 0.5 if at_start else apart))
    alive = job.workers()
    if not alive:
        return job.poll() is None
    for each in alive:
        with suppress(psutil.Error):
            outcome.memory.add(each.environ()[SNAPSHOTS])
    training, newest, starts, victim = all_train(run), newest_step(run), starts_of(run), chance.choice(alive)
    outcome.struck_at.append((newest, len(starts)))
    victim.kill()
    outcome.kills += 1
    wait_until(lambda: job.poll() is not None or not victim.is_running())
    if training:
        wait_until(lambda: job.poll() is not None or len(starts_of(run)) > len(starts))
        if job.poll() is None and not all(each.is_running() for each in alive if each != victim):
            outcome.breaches.append(f"after step {newest} another worker than the killed one has ended")
    return True


def all_train(run: Path) -> bool:
    """Whether a step was recorded since the last start of workers."""
    return bool(starts := starts_of(run)) and newest_step(run) > starts[-1]


def starts_of(run: Path) -> list[int]:
    """Return the step from which each start of the workers continued."""
    return steps_of(run, "run")


def newest_step(run: Path) -> int:
    return max(steps_of(run), default=0)


def steps_of(run: Path, kind: str = "step") -> list[int]:
    """Return the step of each record of a kind."""
    return [record["step"] for record in records(run) if record["kind"] == kind]


def records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return list(read_records(path)) if path.exists() else []


def differences(calm: Path, struck: Path) -> list[str]:
    """Return the differences between two runs that should be equal."""
    found = []
    for name in ("model.safetensors", "states.safetensors"):
        files = [checkpoint_folder.newest(run / "checkpoints") / name for run in (calm, struck)]
        if not same_tensors(*files):
            found.append(f"{name} is not the same")
    expected, steps = (
        [(each["step"], each["loss"], each["samples"]) for each in records(run) if each["kind"] == "step"]
        for run in (calm, struck)
    )
    if steps != expected:
        found.append(f"the steps are not recorded alike: {len(expected)} and {len(steps)}")
    epochs = [
        [(each["step"], each["split"], each["loss"]) for each in records(run) if each["kind"] == "epoch"]
        for run in (calm, struck)
    ]
    if epochs[0] != epochs[1]:
        found.append(f"the epochs are not the same: {len(epochs[0])} and {len(epochs[1])}")
    return found


def resized_differences(calm: Path, resized: Path) -> list[str]:
    """Return the differences between two runs in fp64, one of which had other numbers of workers for a while."""
    steps, expected = steps_of(resized), steps_of(calm)
    found = [] if steps == sorted({*steps}) and {*steps} >= {*expected} else [f"other steps: {steps}"]
    losses = [[each["loss"] for each in records(run) if each["kind"] == "epoch"] for run in (calm, resized)]
    if losses[1] != pytest.approx(losses[0], rel=1e-9):
        found.append(f"other losses: {losses}")
    weights, others = (load_file(run / "model.safetensors") for run in (calm, resized))
    return found + [name for name in weights if not torch.allclose(weights[name], others[name], rtol=0, atol=1e-9)]


def same_tensors(one: Path, other: Path) -> bool:
    tensors, others = load_file(one), load_file(other)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def leftovers(run: Path, memory: set[str]) -> list[str]:
    """Return the job's remaining processes and its files in this host's memory."""
    found = [f"{path} is left" for path in memory if Path(path).exists()] if memory else ["no snapshot folder known"]
    processes = psutil.process_iter(["pid", "cmdline"])
    return found + [f"process {each.pid} is left" for each in processes if str(run) in (each.info["cmdline"] or ())]
