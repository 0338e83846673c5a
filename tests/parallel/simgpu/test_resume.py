"""Training on simulated GPUs that is interrupted, resumed and evaluated, as if nothing had happened."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import simgpu
import torch.distributed as dist
from resumable import USERS, End, KilledError, results, session
from runs import losses
from simulated_gpu import gpu_world, run_on_gpus
from worker_group import run_in_workers

from lockstep.__main__ import main
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _train_twice(_: World, user: str, folder: Path) -> None:
    simgpu.delays(seed=1, copy_us=2000, operation_us=10, collective_us=300)
    with gpu_world() as world:
        for name, end in (("whole", None), ("parts", End(8, KilledError)), ("parts", None)):
            session(world, user, folder / name, end, checkpoint_steps=7, log_every=1)


@pytest.mark.parametrize("user", USERS)
def test_a_resumed_run_with_dropout_is_bit_identical(user: str, tmp_path: Path) -> None:
    run_on_gpus(2, _train_twice, user, tmp_path)
    assert results(tmp_path / "parts") == results(tmp_path / "whole")


def _run_commands(world: World, folder: Path, stops: list[int], device: str) -> str:
    """Train, interrupted after these steps, and evaluate; return what the evaluation prints."""
    if device == "gpu":
        simgpu.delays(seed=1, copy_us=4000, operation_us=20, collective_us=500)
    dist.destroy_process_group()
    train = ["train", "digits", "--run-dir", str(folder), "--device", device, "--precision", "fp64", "--epochs", "1"]
    for stop in stops:
        assert main([*train, "-p", "1", "-b", "64", "--resume", "auto", "--max-steps", str(stop)]) == 0
    printed = StringIO()
    with redirect_stdout(printed):
        assert main(["eval", str(folder / "checkpoints/step-00000004"), "--device", device, "--precision", "fp64"]) == 0
    return printed.getvalue()


def test_commands_on_gpus_print_the_figures_of_cpus(tmp_path: Path) -> None:
    evaluated = run_on_gpus(2, _run_commands, tmp_path / "gpu", [2, 4], "gpu")
    assert evaluated == run_in_workers(2, _run_commands, tmp_path / "cpu", [4], "cpu")
    assert "of 360 images right" in evaluated[0]
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-9)
