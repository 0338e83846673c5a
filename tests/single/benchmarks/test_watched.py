"""A command's steps are timed by its lines, and its memory includes its child processes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from watched import Steps, Watched, watch

pytestmark = pytest.mark.cold
STEPS = Steps(re.compile(r"^step \d"), before=1, timed=2, after=1)
PRINT_STEPS = "import time\nfor step in range({count}):\n    time.sleep(0.3)\n    print('step', step, flush=True)\n"


def _watch(program: str, folder: Path) -> Watched:
    return watch([sys.executable, "-c", program], STEPS, folder, os.environ)


def test_the_timed_steps_are_those_after_the_first_and_before_the_last(tmp_path: Path) -> None:
    watched = _watch(PRINT_STEPS.format(count=4), tmp_path)
    assert 0.6 <= watched.timed_seconds < 1.2
    assert 0.3 <= watched.first_step_seconds < 10


def test_the_memory_is_that_of_all_processes_and_not_sampled_while_steps_are_timed(tmp_path: Path) -> None:
    holder = "held = bytes(range(256)) * 400_000\nprint('held', flush=True)\nimport time\ntime.sleep(60)\n"
    program = (
        "import subprocess, sys, time\n"
        "print('step 0', flush=True)\n"
        "print('step 1', flush=True)\n"
        "print('step 2', flush=True)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {holder!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "time.sleep(1)\n"
        "print('step 3', flush=True)\n"
        "child.kill(); child.wait(); child.stdout.close()\n"
    )
    assert _watch(program, tmp_path).peak_bytes > 102_400_000
    steps = STEPS._replace(timed=3, after=0)  # the child runs during the timed steps
    assert watch([sys.executable, "-c", program], steps, tmp_path, os.environ).peak_bytes < 102_400_000


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (PRINT_STEPS.format(count=3), "printed 3 steps instead of 4:\nstep 0"),
        ("raise SystemExit('no images')", "exited with 1:\nno images"),
    ],
)
def test_a_command_that_fails_or_has_other_steps_is_an_error_with_its_output(
    program: str, error: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=error):
        _watch(program, tmp_path)
