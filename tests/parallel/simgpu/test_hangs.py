"""A hang in the simulated GPU's collectives: torch records these, and the launcher names the rank that is missing."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import simgpu
import torch
import torch.distributed as dist
from commands import LOCKSTEP, run
from simulated_gpu import on_gpus
from time_limits import scaled

from lockstep.diagnosis import flight_recorder
from lockstep.errors import HangError
from lockstep.world.world import World

pytestmark = [
    pytest.mark.usefixtures("simulated_gpu"),
    pytest.mark.skipif(
        not hasattr(dist.distributed_c10d, "FlightRecorderHook"), reason="torch before 2.15 records NCCL and Gloo alone"
    ),
]
TESTS = Path(__file__).parents[2]


@on_gpus(2)
def test_the_devices_first_collective_is_pending_until_it_ends(world: World) -> None:
    group = dist.new_group(backend="simccl")
    with simgpu.held(torch.accelerator.current_stream()):
        dist.all_reduce(torch.ones(3, device="simgpu"), group=group)
        assert [(each.name, each.is_finished) for each in flight_recorder.latest()] == [("all_reduce", False)]
        assert _is_pending()
    while not all(each.is_finished for each in flight_recorder.latest()):
        pass
    assert not _is_pending()
    dist.destroy_process_group(group)


def _is_pending() -> bool:
    started, finished = flight_recorder.counts() or (0, 0)
    return started > finished


@pytest.mark.parametrize("backend", ["simccl", pytest.param("cpu:gloo,simgpu:simccl", marks=pytest.mark.long)])
def test_a_hang_names_the_rank_and_the_devices_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    program = [sys.executable, str(TESTS / "support/hanging.py"), backend, "sleep", "1"]
    done = run([*LOCKSTEP, "run", "-np", "2", "--hang-timeout", f"{scaled(3)}", "--", *program], tmp_path)
    assert done.returncode == HangError.exit_code, done.stdout + done.stderr
    assert re.search(r"lockstep: rank 1 has not entered all_reduce #\d+ of float\[196\]; rank 0 has", done.stderr)
    assert re.search(r"lockstep: rank 1 is in user code, at hanging.py:\d+ in misbehave", done.stderr), done.stderr
    assert "lockstep: the job hung; all workers were stopped" in done.stderr.splitlines()
