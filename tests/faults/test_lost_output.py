"""Nothing reads the output, or the disk is full, or the terminal is closed: the job goes on, with its own exit code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from commands import HOROVODRUN, LOCKSTEP, code_of, own_environment
from disturbed_run import newest_step, recorded_steps

from lockstep.errors import StoppedError

TRAIN = (*LOCKSTEP, "train", "digits", "--device", "cpu", "--run-dir", "run", "--log-every", "1")
FIT = """
import torch
from torch.utils.data import TensorDataset
from lockstep.train import fit

data = TensorDataset(torch.randn(64, 1, 8, 8), torch.arange(64) % 4)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
fit(net, data, data, epochs=2, batch_size=8, lr=0.01, run_dir="run", device="cpu")
open("done", "w").close()
"""


@contextmanager
def lost(kind: str) -> Iterator[IO[bytes]]:
    """A stream that takes nothing."""
    if kind == "full":
        with open("/dev/full", "wb", buffering=0) as stream:
            yield stream
        return
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as stream:
        yield stream


def code_and_errors(command: list[str], folder: Path, kind: str, errors: bool) -> tuple[int, str]:
    """Run a command with a lost stdout and, on request, stderr; return its exit code and stderr."""
    with lost(kind) as stream, open(folder / "stderr", "w+b") as told:
        code = code_of(command, folder, stream, stream if errors else told)
    return code, (folder / "stderr").read_text()


@pytest.mark.parametrize("kind", ["pipe", "full"])
@pytest.mark.parametrize("launcher", [(*LOCKSTEP, "run"), tuple(HOROVODRUN)], ids=["lockstep", "horovodrun"])
@pytest.mark.parametrize("errors", [False, True])
def test_a_job_runs_if_its_output_is_lost(tmp_path: Path, launcher: tuple[str, ...], kind: str, errors: bool) -> None:
    script = 'echo to nobody; echo to nobody >&2; touch "ran-$RANK"; exit 0'
    code, told = code_and_errors([*launcher, "-np", "2", "sh", "-c", script], tmp_path, kind, errors)
    assert code == 0, told
    assert (tmp_path / "ran-0").exists()
    assert (tmp_path / "ran-1").exists()
    if not errors:
        assert told.count("stdout cannot be written: No space left on device") == (kind == "full")
        assert told.count("to nobody") == 2
        assert "Traceback" not in told


@pytest.mark.parametrize("kind", ["pipe", "full"])
def test_the_exit_code_of_a_failed_worker_is_kept(tmp_path: Path, kind: str) -> None:
    code, _ = code_and_errors([*LOCKSTEP, "run", "-np", "2", "sh", "-c", "exit 3"], tmp_path, kind, errors=True)
    assert code == 3


@pytest.mark.parametrize("kind", ["pipe", "full"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_is_finished(tmp_path: Path, workers: int, kind: str) -> None:
    code, told = code_and_errors([*TRAIN, "--epochs", "1", "-np", str(workers)], tmp_path, kind, errors=True)
    assert code == 0, told
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["pipe", "full"])
def test_fit_in_a_script_goes_on(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(FIT)
    code, told = code_and_errors([sys.executable, "script.py"], tmp_path, kind, errors=True)
    assert code == 0, told
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("command", [["models"], ["--help"], ["run", "--dry-run", "-np", "2", "true"]], ids=" ".join)
def test_command_whose_output_is_lost_fails_with_one_line(tmp_path: Path, command: list[str]) -> None:
    code, told = code_and_errors([*LOCKSTEP, *command], tmp_path, "full", errors=False)
    assert (code, told) == (1, f"lockstep {command[0]}: error: the output cannot be written: No space left on device\n")
    assert code_and_errors([*LOCKSTEP, *command], tmp_path, "pipe", errors=False) == (0, "")


@contextmanager
def in_terminal(command: list[str], folder: Path, hangs_up: bool) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a command on a terminal; yield it and the terminal's other end.

    Args:
        hangs_up: Let the terminal be its controlling one, which sends SIGHUP when it is closed.
    """
    end, terminal = pty.openpty()
    words = ["env", "--default-signal=HUP", "setsid", *(["--ctty"] if hangs_up else []), "--wait", *command]
    try:
        process = subprocess.Popen(
            words, cwd=folder, env=own_environment(), stdin=terminal, stdout=terminal, stderr=terminal
        )
        os.close(terminal)
        yield process, end
    finally:
        process.kill()
        process.wait()


@pytest.mark.cold
@pytest.mark.parametrize(("workers", "hangs_up"), [(2, False), (1, True), (2, True)])
def test_a_closed_terminal_loses_no_step(tmp_path: Path, workers: int, hangs_up: bool) -> None:
    command = [*TRAIN, "--epochs", "100000" if hangs_up else "8", "-np", str(workers)]
    with in_terminal(command, tmp_path, hangs_up) as (process, end):
        text = b""
        while b"epoch" not in text:
            text += os.read(end, 1 << 16)
        deadline = time.monotonic() + 60
        while len(_steps(tmp_path)) < 3:
            assert time.monotonic() < deadline, text
            os.read(end, 1 << 16)
        os.close(end)
        code = process.wait(150)
    recorded = recorded_steps(tmp_path / "run")
    assert newest_step(tmp_path / "run") == recorded[-1]
    assert code == (StoppedError.exit_code if hangs_up else 0)


def _steps(folder: Path) -> list[int]:
    return recorded_steps(folder / "run") if (folder / "run" / "metrics.jsonl").exists() else []
