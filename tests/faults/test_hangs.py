"""Hangs on purpose: the launcher names the rank and what it does, and ends the job.

The long form has all kinds with 2 to 4 workers; `docs/explanation/reliability.md` lists the results.
"""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import LOCKSTEP, run, started
from time_limits import scaled

from lockstep.diagnosis.board import Layout
from lockstep.errors import HangError

SUPPORT = Path(__file__).parents[1] / "support"
HANG_SECONDS = 3
DOING = {
    "sleep": "at hanging.py",
    "busy": "at hanging.py",
    "lock": "at hanging.py",
    "stop": "is stopped (process ",
    "gil": "in native code that holds the GIL, or frozen, at hanging.py",
    "gil beside threads": "in native code that holds the GIL, or frozen, at hanging.py",
    "mutex": "in native code that holds the GIL, or frozen, at hanging.py",
    "early": "in user code, at hanging.py",
    "data": "is waiting for data",
    "branch": "ranks have waited in different collectives",
    "evaluation": "in evaluation",
}
SHORT = [("ddp", "data", 3, 1), ("hvd", "branch", 3, 2)]
LONG = [
    ("train", "stop", 2, 1),
    ("ddp", "gil beside threads", 2, 0),
    ("ddp", "early", 2, 1),
    *(
        ("ddp", kind, 2 + number % 3, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil", "mutex"])
    ),
    *(("ddp", "data", workers, workers - 1) for workers in (2, 3, 4)),
    *(
        ("hvd", kind, 2 + number % 3, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil", "gil beside threads"])
    ),
    *(("hvd", kind, 3, 1) for kind in ("data", "branch", "early")),
    *(
        ("fit", kind, 2 + number % 2, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "stop", "gil", "mutex"])
    ),
    *(("fit", kind, 3, 1) for kind in ("data", "branch", "evaluation")),
    *(
        ("train", kind, 2 + number % 3, number % 2)
        for number, kind in enumerate(["sleep", "busy", "lock", "gil", "mutex"])
    ),
    *(("train", kind, 3, 2) for kind in ("data", "branch", "evaluation")),
]


def command(engine: str, kind: str, workers: int, rank: int) -> list[str]:
    flags = ["-np", str(workers), "--hang-timeout", f"{scaled(HANG_SECONDS)}"]
    if engine != "train":
        return [*LOCKSTEP, "run", *flags, "--", sys.executable, str(SUPPORT / "hanging.py"), engine, kind, str(rank)]
    parts = ["--data", "hanging:data", "--model", "hanging:net", "-b", "4", "--epochs", "2", "-j", "1"]
    return [*LOCKSTEP, "train", *flags, *parts, "--device", "cpu", "--run-dir", "run", "--lr", "0.01"]


@pytest.mark.parametrize(
    ("engine", "kind", "workers", "rank"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_a_hang_is_explained_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, kind: str, workers: int, rank: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("HANGING", f"{kind} {rank}")
    done = run(command(engine, kind, workers, rank), tmp_path)
    assert done.returncode == HangError.exit_code, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    head = next(line for line in lines if re.match(r"lockstep: ranks? ", line))
    if kind == "branch":
        assert f"lockstep: rank {rank} in " in done.stderr
    else:
        assert head.startswith(f"lockstep: rank {rank} has not entered "), done.stderr
    assert DOING[kind] in done.stderr
    assert "lockstep: the job hung; all workers were stopped" in lines


# Rank 1 hangs in an import before that of torch.
EARLY = """
import os, sys
if os.environ["RANK"] == "1":
    sys.path.insert(0, ".")
    import slow_module
import torch.distributed as dist

dist.init_process_group("gloo")
"""


def test_hang_before_the_import_of_torch_is_explained(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(10_000)\n")
    flags = ["-np", "2", "--hang-timeout", f"{scaled(HANG_SECONDS)}"]
    done = run([*LOCKSTEP, "run", *flags, "--", sys.executable, "-c", EARLY], tmp_path)
    assert done.returncode == HangError.exit_code, done.stderr
    assert "lockstep: rank 1 has not entered the creation of a process group; rank 0 has waited" in done.stderr
    assert "rank 1 is in user code before its import of torch, at slow_module.py:2 in <module>" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("seconds", "knows_the_line"), [(14.0, True), (60.0, False)])
def test_hang_ends_even_if_the_node_process_stalls(tmp_path: Path, seconds: float, knows_the_line: bool) -> None:
    """After 14 s it answers the second inspection; after two failed ones, the job ends with what the boards showed."""
    with started(command("ddp", "gil", 2, 1), tmp_path) as job:
        (guard,) = job.wait_until(job.children)
        (node,) = job.wait_until(guard.children)
        job.wait_until(lambda: any(_is_asked(worker) for worker in node.children()))
        node.suspend()
        end = time.monotonic() + seconds
        with suppress(psutil.NoSuchProcess):  # killed by the launcher
            job.wait_until(lambda: time.monotonic() > end or job.poll() is not None, seconds + 10)
            node.resume()
        assert job.wait() == HangError.exit_code, job.text
    assert "lockstep: rank 1 has not entered " in job.text
    assert ("at hanging.py" in job.text) == knows_the_line, job.text
    assert ("2 inspections failed (no answer within 10 s)" in job.text) != knows_the_line


def _is_asked(worker: psutil.Process) -> bool:
    """Whether its node process has asked it what it does."""
    with suppress(psutil.Error, OSError, KeyError):
        boards = Path(worker.environ()["LOCKSTEP_PROGRESS"]).glob(f"*-{worker.pid}.board")
        return any(Layout.from_buffer_copy(path.read_bytes()).question for path in boards)
    return False


@pytest.mark.long
def test_a_training_that_hangs_once_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("HANGING", "once 1")
    done = run([*command("train", "once", 2, 1), "--max-restarts", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lockstep: rank 1 has not entered " in done.stderr
    assert "lockstep: restart 1 of 1, with 2 workers" in done.stderr
