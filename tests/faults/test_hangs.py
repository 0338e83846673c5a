"""Hangs on purpose: the launcher names the rank and what it does, and ends the job.

The long form has all kinds with 2 to 4 workers; `docs/explanation/reliability.md` lists the results.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from commands import LOCKSTEP, run

from lockstep.errors import HangError

SUPPORT = Path(__file__).parents[1] / "support"
HANG_SECONDS = 5
DOING = {
    "sleep": "at hanging.py",
    "busy": "at hanging.py",
    "lock": "at hanging.py",
    "stop": "is stopped (process ",
    "gil": "in native code that holds the GIL",
    "data": "is waiting for data",
    "branch": "ranks have waited in different collectives",
    "evaluation": "in evaluation",
}
SHORT = [("ddp", "data", 3, 1), ("ddp", "lock", 2, 0), ("hvd", "branch", 3, 2), ("train", "stop", 2, 1)]
LONG = [
    *(
        ("ddp", kind, 2 + number % 3, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil"])
    ),
    *(("ddp", "data", workers, workers - 1) for workers in (2, 3, 4)),
    *(
        ("hvd", kind, 2 + number % 3, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil"])
    ),
    *(("hvd", kind, 3, 1) for kind in ("data", "branch")),
    *(
        ("fit", kind, 2 + number % 2, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil"])
    ),
    *(("fit", kind, 3, 1) for kind in ("data", "branch", "evaluation")),
    *(("train", kind, 2 + number % 3, number % 2) for number, kind in enumerate(["sleep", "busy", "lock", "gil"])),
    *(("train", kind, 3, 2) for kind in ("data", "branch", "evaluation")),
]


def command(engine: str, kind: str, workers: int, rank: int) -> list[str]:
    flags = ["-np", str(workers), "--hang-timeout", str(HANG_SECONDS)]
    if engine != "train":
        return [*LOCKSTEP, "run", *flags, "--", sys.executable, str(SUPPORT / "hanging.py"), engine, kind, str(rank)]
    parts = ["--data", "hanging:data", "--model", "hanging:net", "-b", "4", "--epochs", "2", "-j", "1"]
    return [*LOCKSTEP, "train", *flags, *parts, "--device", "cpu", "--run-dir", "run", "--lr", "0.01"]


@pytest.mark.parametrize(
    ("engine", "kind", "workers", "rank"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_a_hang_is_explained_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, kind: str, workers: int, rank: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("HANGING", f"{kind} {rank}")
    start = time.monotonic()
    done = run(command(engine, kind, workers, rank), tmp_path)
    seconds = time.monotonic() - start
    assert done.returncode == HangError.exit_code, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    head = next(line for line in lines if re.match(r"lockstep: ranks? ", line))
    if kind == "branch":
        assert f"lockstep: rank {rank} in " in done.stderr
    else:
        assert head.startswith(f"lockstep: rank {rank} has not entered "), done.stderr
    assert DOING[kind] in done.stderr
    assert "lockstep: the job hung; all workers were stopped" in lines
    print(f"{engine} {kind} with {workers} workers: {seconds:.0f} s")


def test_a_training_that_hangs_once_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("HANGING", "once 1")
    done = run([*command("train", "once", 2, 1), "--max-restarts", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lockstep: rank 1 has not entered " in done.stderr
    assert "lockstep: restart 1 of 1, with 2 workers" in done.stderr
