"""What is recorded of the machine."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.run.records.run_folder import describe_environment, describe_publicly
from lockstep.world import machine
from lockstep.world.devices import usable_cores
from lockstep.world.launcher_environment import RankInfo
from lockstep.world.world import World

WORLD = World(RankInfo(), torch.device("cpu"))


@pytest.mark.parametrize("describe", [describe_environment, describe_publicly])
@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel name\t: Fast CPU 9000 @ 3 GHz\nmodel name\t: other\n", "Fast CPU 9000 @ 3 GHz"),
        ("", None),
    ],
)
def test_the_processor_is_named_with_its_cores(
    describe: Any, cpuinfo: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    facts = describe(WORLD)
    assert facts["processor"] == (name or platform.machine())
    assert facts["cores"] == usable_cores()


def test_public_description_has_the_machine_without_its_name() -> None:
    facts = describe_publicly(WORLD)
    assert {"packages", "cores", "processor", "load_average", "threads_per_worker"} <= facts.keys()
    assert not {"host", "folder", "command"} & facts.keys()
    assert str(Path.cwd()) not in json.dumps(facts)
