"""Nothing reads the output, or the disk is full, or the terminal is closed: the job goes on, with its own exit code."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from commands import LOCKSTEP, code_of, own_environment
from disturbed_run import newest_step, recorded_steps
from time_limits import extended

from lockstep.errors import StoppedError

TRAIN = (*LOCKSTEP, "train", "digits", "--device", "cpu", "--run-dir", "run", "--log-every", "1")


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


@pytest.mark.parametrize(("kind", "errors"), [("pipe", True), ("full", False)])
def test_a_job_runs_with_its_exit_code_if_its_output_is_lost(tmp_path: Path, kind: str, errors: bool) -> None:
    script = 'echo to nobody; echo to nobody >&2; touch "ran-$RANK"; until [ -e ran-0 ]; do sleep 0.1; done'
    code, told = code_and_errors(
        [*LOCKSTEP, "run", "-np", "2", "sh", "-c", f"{script}; exit $((3 * RANK))"], tmp_path, kind, errors
    )
    assert code == 3, told
    assert (tmp_path / "ran-0").exists()
    if not errors:
        assert told.count("stdout cannot be written: No space left on device") == 1
        assert told.count("to nobody") == 2
        assert "Traceback" not in told


@pytest.mark.parametrize(("workers", "kind"), [pytest.param(1, "full", marks=pytest.mark.long), (2, "pipe")])
def test_a_training_is_finished(tmp_path: Path, workers: int, kind: str) -> None:
    code, told = code_and_errors([*TRAIN, "--epochs", "1", "-np", str(workers)], tmp_path, kind, errors=True)
    assert code == 0, told
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("command", [["models"], ["run", "--dry-run", "-np", "2", "true"]], ids=" ".join)
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
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_closed_terminal_loses_no_step(tmp_path: Path, hangs_up: bool) -> None:
    command = [*TRAIN, "--epochs", "100000" if hangs_up else "3", "-np", "2"]
    with in_terminal(command, tmp_path, hangs_up) as (process, end):
        text = b""
        while b"epoch" not in text:
            text += os.read(end, 1 << 16)
        while len(_steps(tmp_path)) < 3:
            text += os.read(end, 1 << 16)
        os.close(end)
        code = extended(process.wait)
    recorded = recorded_steps(tmp_path / "run")
    assert newest_step(tmp_path / "run") == recorded[-1]
    assert code == (StoppedError.exit_code if hangs_up else 0)


def _steps(folder: Path) -> list[int]:
    return recorded_steps(folder / "run") if (folder / "run" / "metrics.jsonl").exists() else []
