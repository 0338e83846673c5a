"""What `import torch` loads of Lockstep."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from commands import own_environment, run

from lockstep.diagnosis.board import boards_in

SHOW = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('lockstep')))"
GROUP = """
import threading, torch, torch.distributed as dist

def names():
    return [thread.name for thread in threading.enumerate()]

print(names())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(names())
"""


def test_torch_finds_the_entry_point() -> None:
    (found,) = entry_points(group="torch.backends", name="lockstep")
    assert found.value == "lockstep.diagnosis.autoload:attach"


@pytest.mark.cold
def test_worker_publishes_from_its_first_group_and_others_never(tmp_path: Path) -> None:
    environment = own_environment(RANK="3", LOCKSTEP_PROGRESS=str(tmp_path))
    programs = [([sys.executable, "-c", SHOW], own_environment()), ([sys.executable, "-c", GROUP], environment)]
    other, worker = (run(command, tmp_path, own, cold=True) for command, own in programs)
    assert other.stdout == "['lockstep', 'lockstep.diagnosis', 'lockstep.diagnosis.autoload']\n", other.stderr
    assert worker.stdout == "['MainThread']\n['MainThread', 'lockstep-diagnosis']\n", worker.stderr
    (board,) = boards_in(tmp_path)
    assert board.rank == 3
    assert board.read().is_judged
