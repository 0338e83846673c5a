"""A pipe where a file of others is read ends nothing and keeps no process waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.packed.pack_reader import is_packed
from lockstep.errors import ConfigError
from lockstep.files.jsonl import read_records
from lockstep.launch.plan.allocation import find_allocation
from lockstep.report.watch.workers import FollowedFile
from lockstep.train.checkpoints.checkpoint_format import describe_file


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "read", "result"),
    [
        ("dataset.json", lambda path: is_packed(path.parent), False),
        ("model.safetensors", describe_file, None),
        ("metrics.jsonl", lambda path: FollowedFile(path).read().records, []),
        ("metrics.jsonl", lambda path: list(read_records(path)), OSError),
        ("nodes", lambda path: find_allocation({"PBS_NODEFILE": str(path), "PBS_JOBID": "1"}), ConfigError),
    ],
    ids=["pack", "checkpoint", "watch", "records", "batch system"],
)
def test_a_pipe_is_not_waited_for(name: str, read: Callable[[Path], Any], result: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    if isinstance(result, type):
        with pytest.raises(result, match="not a regular file"):
            read(tmp_path / name)
    else:
        assert read(tmp_path / name) == result
