"""Hangs under launchers that do not watch the workers: these explain them themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import TORCHRUN, own_environment, run

from lockstep.errors import ConfigError, HangError
from lockstep.world.group_watch import hang_limit

SUPPORT = Path(__file__).parents[1] / "support"
TRAIN = ["--data", "hanging:data", "--model", "hanging:net", "-b", "4", "--epochs", "2", "-j", "1", "--device", "cpu"]
DOING = {
    "stop": "rank 1 is not responding: its process is stopped or frozen",
    "data": "rank 1 is waiting for data",
    "sleep": "rank 1 is in forward, at hanging.py:",
}


@pytest.mark.parametrize("kind", ["stop", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("data", "sleep"))])
def test_under_torchrun_the_workers_explain_a_hang_and_end(tmp_path: Path, kind: str) -> None:
    environment = own_environment(PYTHONPATH=str(SUPPORT), HANGING=f"{kind} 1", OMP_NUM_THREADS="1")
    command = [*TORCHRUN, "-m", "lockstep", "train", *TRAIN, "--run-dir", "run", "--lr", "0.01", "--hang-timeout", "5"]
    done = run(command, tmp_path, environment)
    text = done.stdout + done.stderr
    assert done.returncode, text
    assert "lockstep: rank 1 " in text
    assert "has not entered " in text
    assert DOING[kind] in text
    assert f"exitcode  : {HangError.exit_code} " in text


CALM = """
import time
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import connect

with connect(RankInfo.from_environment(), "cpu") as world:
    end = time.monotonic() + 10
    while world.rank == 0 and time.monotonic() < end:
        with open("file", "wb") as file:
            file.write(bytes(1 << 20))
        time.sleep(0.2)
    world.barrier()
print(f"rank {world.rank} is done")
"""


def test_slow_work_of_one_rank_is_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "calm.py").write_text(CALM)
    done = run([*TORCHRUN, "calm.py"], tmp_path, own_environment(OMP_NUM_THREADS="1", LOCKSTEP_HANG_TIMEOUT="4"))
    assert (done.returncode, done.stdout.count("is done")) == (0, 2), done.stderr
    assert "has not entered" not in done.stderr


def test_the_limit_is_a_number_of_seconds() -> None:
    assert hang_limit({}) == 300
    assert hang_limit({"LOCKSTEP_HANG_TIMEOUT": "12.5"}) == 12.5
    assert hang_limit({"LOCKSTEP_HANG_TIMEOUT": "0"}) == 0
    with pytest.raises(ConfigError, match="LOCKSTEP_HANG_TIMEOUT 'soon': must be 0 or more seconds"):
        hang_limit({"LOCKSTEP_HANG_TIMEOUT": "soon"})
