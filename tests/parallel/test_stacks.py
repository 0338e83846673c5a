"""`lockstep stacks`: what the workers of running jobs do, from another terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from commands import LOCKSTEP, own_environment, run, started

HANGING = Path(__file__).parents[1] / "support/hanging.py"


def test_workers_with_the_same_stack_are_shown_together(tmp_path: Path) -> None:
    command = [*LOCKSTEP, "run", "-np", "3", "--", sys.executable, str(HANGING), "ddp", "sleep", "1"]
    with started(command, tmp_path) as job:
        stacks = [*LOCKSTEP, "stacks", str(job.pid)]
        text = job.wait_until(lambda: _until_in_collective(run(stacks, tmp_path).stdout))
    assert re.match(rf".*lockstep run -np 3 -- .*hanging.py ddp sleep 1 · process {job.pid}\n", text)
    waiting, busy = re.split(r"\n\n", text)[1:]
    assert re.match(r"ranks 0 and 2 · in all_reduce #\d+ of float\[196\]\n", waiting)
    assert "  <module> (" in waiting
    assert re.match(r"rank 1 · in user code, at hanging.py:\d+ in misbehave\n  misbehave \(", busy)


def _until_in_collective(text: str) -> str:
    """The text once both other ranks wait in the collective, and not just on their way there."""
    return text if text.count("\n\n") == 2 and "in all_reduce" in text and "misbehave" in text else ""


def test_a_run_folder_names_the_job_that_writes_it(tmp_path: Path) -> None:
    path = f"{HANGING.parent}:{os.environ.get('PYTHONPATH', '')}"
    environment = own_environment(PYTHONPATH=path, HANGING="sleep 1", OMP_NUM_THREADS="1")
    flags = ["-np", "2", "--data", "hanging:data", "--model", "hanging:net", "-b", "4", "-j", "1", "--lr", "0.01"]
    train = [*LOCKSTEP, "train", *flags, "--device", "cpu", "--run-dir", "a-run"]
    other = [*LOCKSTEP, "run", "-np", "1", "--", "sleep", "100"]
    with started(train, tmp_path, environment) as job, started(other, tmp_path, output=tmp_path / "other.txt"):
        stacks = [*LOCKSTEP, "stacks", "a-run"]
        text = job.wait_until(lambda: "misbehave" in (text := run(stacks, tmp_path).stdout) and text)
    assert re.match(rf".*lockstep train .*--run-dir a-run · process {job.pid}\n\nrank", text)
    assert text.count("· process ") == 1


@pytest.mark.parametrize("words", [["1"], ["77777777"]])
def test_what_is_not_a_launcher_is_refused(tmp_path: Path, words: list[str]) -> None:
    done = run([*LOCKSTEP, "stacks", *words], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockstep stacks: error: {words[0]}: not one of your launchers; ")
