"""Time whole training commands, from their start to their end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.files.jsonl import read_records


def time_command(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] = os.environ
) -> tuple[float, str]:
    """Run a command in a folder; return its seconds and its output.

    Raises:
        subprocess.CalledProcessError: It failed; its errors were printed.
    """
    start = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return time.monotonic() - start, done.stdout


def time_lockstep(
    arguments: Sequence[str], run_dir: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, float]:
    """Run `lockstep train`; return the seconds of the command and of the training, the last epoch and its top-1."""
    command = [sys.executable, "-m", "lockstep", "train", *arguments, "--run-dir", str(run_dir)]
    seconds, _ = time_command(command, run_dir.parent, environment)
    last = [record for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "epoch"][-1]
    return {
        "command_seconds": seconds,
        "training_seconds": last["time_seconds"],
        "epochs": last["epoch"],
        "top1": last["top1"],
    }
