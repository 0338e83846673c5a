"""NaN in one worker's sample, on simulated GPUs: the same steps are skipped as on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import simgpu
from bad_samples import BAD, figures, log, train
from simulated_gpu import gpu_world, run_on_gpus
from worker_group import run_in_workers

from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _train(_: World, path: Path, settings: dict[str, Any]) -> str:
    simgpu.delays(seed=1, copy_us=200, operation_us=20, collective_us=500)
    with gpu_world() as world:
        return train(world, path, float("nan"), settings, "plain")


def test_nan_on_a_gpu_is_skipped_as_on_a_cpu(tmp_path: Path) -> None:
    settings = {"on_nan": "skip", "checkpoint_steps": 2, "clip_norm": 1.0, "precision": "fp64", "track": ()}
    assert run_on_gpus(2, _train, tmp_path / "gpu", {**settings, "run_dir": tmp_path / "gpu"}) == ["", ""]
    settings["run_dir"] = tmp_path / "cpu"
    assert run_in_workers(2, train, tmp_path / "cpu", float("nan"), settings, "plain") == ["", ""]
    assert [skipped for _, _, skipped in figures(tmp_path / "gpu")] == [0, 1, 1, 2, 2, 2]
    for gpu, cpu in zip(figures(tmp_path / "gpu"), figures(tmp_path / "cpu"), strict=True):
        assert gpu == pytest.approx(cpu, rel=1e-9)
    assert f"found it first in the input, sample {BAD}" in log(tmp_path / "gpu")
