"""The exit of a process whose streams are still busy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import simgpu
import torch
from commands import of_one_thread, run
from simulated_gpu import run_on_gpu

pytestmark = pytest.mark.usefixtures("simulated_gpu")
PROGRAM = """
import simgpu, torch
simgpu.install()
values = torch.ones(4, device="simgpu:0")
simgpu.launch_failing_operation(torch.accelerator.current_stream())
while not simgpu.counts()["failed operations"]:
    pass
simgpu.delays(operation_us=200_000)
with torch.Stream("simgpu:1"):
    for _ in range(100):
        values = torch.ones(4, device="simgpu:1") + 1
"""


def _fail() -> None:
    simgpu.launch_failing_operation(torch.accelerator.current_stream())
    while not simgpu.counts()["failed operations"]:
        pass


def test_worker_with_an_unreported_failure_fails() -> None:
    with pytest.raises(AssertionError, match="failing operation failed asynchronously: injected failure"):
        run_on_gpu(_fail)


def test_exit_reports_failures_without_waiting_for_streams(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = of_one_thread(PYTHONPATH=str(Path(__file__).parents[2]))
    done = run([sys.executable, tmp_path / "program.py"], tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert "simgpu: no call has reported this error: failing operation failed asynchronously: injected" in done.stderr
