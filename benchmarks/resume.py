"""How long does a resumed run take to its first step, compared with a new run?

    python benchmarks/resume.py [ROUNDS]

resnet18 on the digits, with momentum: 11.2 million weights, a checkpoint of 89 MB. The new run takes its first step;
the resumed run takes the second step, with `--resume auto`, in a fresh copy of a run folder. A turn is one command, on
all cores; its figures are those of startup.py. The second comparison only reads that checkpoint, in one process with
one thread, from cached files. Lockstep checks the files' SHA-256 against the manifest and reads them. `torch.load`
(weights_only) reads the same weights and optimizer state, without a check and after computing the file's SHA-256, as
it has no integrity check.

Bar: resuming takes at most 1.1 times as long as starting, to the first step. About 3 minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import Bar, Unit, Work, argument, compare, pin, rounds
from readings import compare_readings
from startup import FIRST_STEP, of_run, timed

from lockstep.run.checkpoints import checkpoint_folder, checkpoint_format

TRAIN = ["-m", "lockstep", "train", "digits", "-a", "resnet18", "-b", "8", "--optimizer", "sgd", "--device", "cpu"]
READS = 3  # per turn
READ_ROUNDS = 9


def one_step(run: Path | str, last_step: int) -> list[str]:
    return [*TRAIN, "--run-dir", str(run), "--max-steps", str(last_step)]


def starts(run: Path, rounds: int) -> None:
    contestants = {
        "new run": timed(one_step("FOLDER/run", 1), of_run),
        "resumed run": timed(
            [*one_step("FOLDER/run", 2), "--resume", "auto"],
            of_run,
            prepare=lambda folder: shutil.copytree(run, folder / "run", symlinks=True),
        ),
    }
    bars = {(FIRST_STEP, "resumed run"): Bar("at most", 1.1)}
    compare_readings("resume: start", contestants, bars, "seconds", rounds)


def reads(run: Path, folder: Path) -> None:
    """Compare reading a checkpoint with `torch.load` on the same tensors."""
    path = checkpoint_folder.newest(run / "checkpoints")
    assert path is not None
    saved = checkpoint_format.load(path)
    pickled = folder / "checkpoint.pt"
    torch.save({"model": dict(saved.model), "states": dict(saved.states)}, pickled)

    def of_torch(checks: bool) -> Work:
        def turn() -> int:
            for _ in range(READS):
                if checks:
                    with pickled.open("rb") as file:
                        hashlib.file_digest(file, "sha256")
                torch.load(pickled, weights_only=True)
            return READS

        return turn

    def of_lockstep() -> int:
        for _ in range(READS):
            checkpoint_format.load(path)
        return READS

    contestants = {"torch.load": of_torch(False), "SHA-256, torch.load": of_torch(True), "Lockstep": of_lockstep}
    compare("resume: read a checkpoint", contestants, {}, Unit("ms", 1000), READ_ROUNDS)


def main(rounds: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        subprocess.run([sys.executable, *one_step(run, 1)], check=True, stdout=subprocess.DEVNULL)
        starts(run, rounds)
        pin()
        reads(run, Path(folder))


if __name__ == "__main__":
    main(argument("rounds", rounds, 5))
