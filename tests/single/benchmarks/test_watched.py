"""A command's steps are timed by its lines, and its memory includes child processes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from watched import Steps, Watched, pss_of_all, watch

STEPS = Steps(re.compile(r"^step \d"), before=1, timed=2, after=1)


def _watch(program: str, folder: Path) -> Watched:
    return watch(["sh", "-c", program], STEPS, folder, os.environ)


def _steps(seconds: Sequence[float]) -> str:
    return "; ".join(f"sleep {each}; echo step {step}" for step, each in enumerate(seconds))


def test_timed_steps_exclude_the_first_and_the_last(tmp_path: Path) -> None:
    watched = _watch(_steps([0.2, 0.1, 0.1, 4]), tmp_path)
    assert 0 < watched.timed_seconds < 4
    assert watched.first_step_seconds >= 0.2


def test_the_memory_is_that_of_all_processes() -> None:
    program = "exec 3<&0; cat <&3 & wait"  # its standard input would be empty otherwise
    with subprocess.Popen(["sh", "-c", program], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        both, alone = pss_of_all(process.pid), pss_of_all(child.pid)
        child.kill()
    assert both > alone > 0
    assert pss_of_all(process.pid) == 0


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (_steps([0, 0, 0]), "printed 3 steps instead of 4:\nstep 0"),
        ("echo no images; exit 1", "exited with 1:\nno images"),
    ],
)
def test_failing_command_is_an_error_with_its_output(program: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=error):
        _watch(program, tmp_path)
