"""What is recorded of the machine."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from lockstep.run.records.run_folder import describe_environment
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
