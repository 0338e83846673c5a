"""`lockstep stacks`: what the workers of running jobs do, from another terminal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from commands import LOCKSTEP, run, started

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
