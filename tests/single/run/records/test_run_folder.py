"""What is recorded of the machine."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.run.records.run_folder import describe_environment, logger, start_log
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

WORLD = World(RankInfo(), torch.device("cpu"))


def test_the_processor_is_named_with_its_cores() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    facts = describe_environment(WORLD)
    assert facts["processor"] == (models[0] if models else platform.machine())
    assert facts["cores"] == usable_cores()


def test_a_removed_folder_of_an_earlier_run_stays_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / run / "worker-0.log" for run in ("first", "second")]
    for log in logs:
        start_log(log, rank=0)
        logger.info("a line")
        shutil.rmtree(tmp_path / "first", ignore_errors=True)  # as a program may do after its run
    assert [log.exists() for log in logs] == [False, True]
    assert not capsys.readouterr().err
