"""Kill workers of training runs at random moments: `python tests/support/worker_kills.py --kills 100 --seed 0`.

Each job is first trained without kills. Then the same job runs with restarts, and random workers are killed (SIGKILL),
mostly during training, sometimes while workers start. The others must keep their processes once they train. At the end,
weights, optimizer state, evaluations and mean losses of the steps must be bit-identical, each step must be recorded
once and in order, no kill may have repeated more recorded steps than one snapshot interval (two if it prevented a
snapshot), and no process or file in /dev/shm may remain. It prints one line per job, and exits with code 1 after any
failed check.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from commands import LOCKSTEP, Job, run, started
from safetensors.torch import load_file

from lockstep.files.jsonl import read_records
from lockstep.run.checkpoints import checkpoint_folder
from lockstep.world import SNAPSHOTS

SNAPSHOT_STEPS = 5
START_SECONDS = 120.0  # on a busy machine
AT_START = 0.15  # fraction of the kills while workers start
COMMON = ("--checkpoint-epochs", "5", "-p", str(SNAPSHOT_STEPS), "--io-every", "0", "--track")
JOBS = {
    "ddp": ("-np", "2"),
    "horovod": ("-np", "2", "--strategy", "horovod", "--optimizer", "adam", "--lr", "0.001"),
    "average": ("-np", "3", "--ema-decay", "0.99", "--accumulate", "2", "-b", "20"),
    "sharded": ("-np", "2", "--shard-optimizer", "--optimizer", "adamw", "--lr", "0.001", "--compress", "powersgd"),
}


@dataclass
class Outcome:
    """The outcome of a job with kills; `breaches`, the failed checks, should be empty.

    `struck_at` has, for each kill, the newest recorded step and how often training had started before. `memory` has the
    snapshot folders that the workers reported.
    """

    kills: int = 0
    at_start: int = 0
    struck_at: list[tuple[int, int]] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    memory: set[str] = field(default_factory=set)
    seconds: float = 0.0
    breaches: list[str] = field(default_factory=list)


def command(words: Sequence[str], run: Path, epochs: int, restarts: int = 0) -> list[str]:
    train = [*LOCKSTEP, "train", "digits", "--run-dir", str(run), "--epochs", str(epochs)]
    return [*train, *words, *COMMON, *(["--max-restarts", str(restarts)] if restarts else [])]


def disturb(
    words: Sequence[str], folder: Path, epochs: int, kills: int, chance: random.Random, apart: float = 1.5
) -> Outcome:
    """Train a job without and with kills, each up to `apart` seconds after training has started, and compare."""
    outcome, began = Outcome(), time.monotonic()
    calm, struck = folder / "calm", folder / "struck"
    folder.mkdir(exist_ok=True)
    done = run(command(words, calm, epochs), folder, timeout=START_SECONDS * 4)
    assert done.returncode == 0, done.stderr
    with started(command(words, struck, epochs, restarts=kills), folder) as job:
        while outcome.kills < kills and strike(job, struck, outcome, chance, apart):
            pass
        code = job.wait(START_SECONDS * 4)
    if code:
        outcome.breaches.append(f"exit code {code}: {job.text[-800:]}")
        return outcome
    starts = starts_of(struck)
    outcome.repeated = [step - starts[begun] for step, begun in outcome.struck_at if begun < len(starts)]
    if outcome.repeated and max(outcome.repeated) > 2 * SNAPSHOT_STEPS:
        outcome.breaches.append(f"{max(outcome.repeated)} recorded steps were taken again")
    outcome.breaches += [*differences(calm, struck), *leftovers(struck, outcome.memory)]
    outcome.seconds = time.monotonic() - began
    return outcome


def strike(job: Job, run: Path, outcome: Outcome, chance: random.Random, apart: float) -> bool:
    """Kill one worker at a random moment; return False if the job exited first."""
    at_start = chance.random() < AT_START
    wait_for(lambda: job.poll() is not None or bool(job.workers()))
    if not at_start:
        wait_for(lambda: job.poll() is not None or all_train(run))
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
    outcome.at_start += not training
    wait_for(lambda: job.poll() is not None or not victim.is_running())
    if training:
        wait_for(lambda: job.poll() is not None or len(starts_of(run)) > len(starts))
        if job.poll() is None and not all(each.is_running() for each in alive if each != victim):
            outcome.breaches.append(f"after step {newest} another worker than the killed one has ended")
    return True


def all_train(run: Path) -> bool:
    """Whether a step was recorded since the last start of workers."""
    return bool(starts := starts_of(run)) and newest_step(run) > starts[-1]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the job stands still")
        time.sleep(0.02)


def starts_of(run: Path) -> list[int]:
    """Return the step from which each start of the workers continued."""
    return [record["step"] for record in records(run) if record["kind"] == "run"]


def newest_step(run: Path) -> int:
    return max((record["step"] for record in records(run) if record["kind"] == "step"), default=0)


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


def same_tensors(one: Path, other: Path) -> bool:
    tensors, others = load_file(one), load_file(other)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def leftovers(run: Path, memory: set[str]) -> list[str]:
    """Return the job's remaining processes and its files in this host's memory."""
    found = [f"{path} is left" for path in memory if Path(path).exists()] if memory else ["no snapshot folder known"]
    processes = psutil.process_iter(["pid", "cmdline"])
    return found + [f"process {each.pid} is left" for each in processes if str(run) in (each.info["cmdline"] or ())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--jobs", default=",".join(JOBS))
    options = parser.parse_args()
    chance, breaches = random.Random(options.seed), 0
    names = options.jobs.split(",")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcome = disturb(JOBS[name], Path(folder), options.epochs, options.kills // len(names), chance)
        breaches += len(outcome.breaches)
        print(
            f"{name:8s} {outcome.kills:3d} kills ({outcome.at_start} at the start), at most "
            f"{max(outcome.repeated, default=0)} recorded steps repeated, {outcome.seconds:.0f} s: "
            f"{'; '.join(outcome.breaches) or 'ok'}",
            flush=True,
        )
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
