"""Messages that scripts with an own loop get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.run.connect import TrainingWorld
from lockstep.run.messages import name_arguments
from lockstep.run.records.run_folder import LOCKED_HINT
from lockstep.run.replicas import CAUSES
from lockstep.world.launcher_environment import RankInfo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--checkpoint-steps -1: must be at least 0", "checkpoint_steps=-1: must be at least 0"),
        ("runs cannot be written; choose another (--run-dir)", "runs cannot be written; choose another (folder=)"),
        ("use identical hosts, or add --check-replicas 0", "use identical hosts, or add check_replicas=0"),
        ("time limit: 0:10:00 left (--time-limit)", "time limit: 0:10:00 left (time_limit=)"),
        ("start it by lockstep run --max-restarts 3", "start it by lockstep run --max-restarts 3"),
        ("the script's own --keep-all", "the script's own --keep-all"),
    ],
)
def test_flags_become_arguments(text: str, expected: str) -> None:
    assert name_arguments(text) == expected


@pytest.mark.parametrize("text", [CAUSES, LOCKED_HINT])
def test_hints_name_no_flags(text: str) -> None:
    assert "--" in text
    assert "--" not in name_arguments(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "^keep=0: must be at least 1$"),
        ({"log_every": 0}, "log_every=0: must be"),
        ({"checkpoint_epochs": -1}, "checkpoint_epochs=-1: must be"),
        ({"check_replicas": -1}, "check_replicas=-1: must be"),
        ({"time_limit": "soon"}, "time_limit="),
        ({"folder": "/"}, "folder=/: is the root"),
        ({"folder": __file__}, r"choose another \(folder=\)"),
    ],
)
def test_errors_of_run_name_its_arguments(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    world = TrainingWorld(RankInfo(), torch.device("cpu"))
    with pytest.raises(ConfigError, match=message) as raised:
        world.run(**{"folder": tmp_path, "model": nn.Linear(1, 1), **options})
    assert "--" not in str(raised.value)
