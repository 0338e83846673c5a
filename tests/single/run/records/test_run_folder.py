"""What is recorded of the machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from lockstep.run.records.run_folder import describe_environment
from lockstep.world import machine
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

WORLD = World(RankInfo(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast CPU 9000 @ 3 GHz\nmodel name\t: other\n", "Fast CPU 9000 @ 3 GHz"),
        ("", None),
    ],
)
def test_the_processor_is_named_with_its_cores(
    cpuinfo: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    facts = describe_environment(WORLD)
    assert facts["processor"] == (name or platform.machine())
    assert facts["cores"] == usable_cores()
