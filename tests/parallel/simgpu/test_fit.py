"""`fit()` in a script that has created a process group of its own, bound to simulated GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simgpu
import torch
import torch.distributed as dist
from separable import linear_net, separable
from simulated_gpu import run_on_gpus
from torch import Tensor
from worker_group import run_in_workers

from lockstep.train import Result, fit
from lockstep.world.world import World

pytestmark = pytest.mark.usefixtures("simulated_gpu")


def _confidence(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.softmax(1).max(1).values.sum(), len(targets)


def _recall(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    right = outputs.argmax(1) == targets
    return torch.bincount(targets[right], minlength=3), torch.bincount(targets, minlength=3)


def _fit(world: World, folder: Path) -> Result:
    metrics = {"confidence": _confidence, "recall": _recall}
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 12, "precision": "fp64", "loader_workers": 0, "track": ()}
    return fit(linear_net(), separable(320, 1), separable(65, 2), metrics=metrics, lr=0.02, run_dir=folder, **settings)


def _fit_in_own_group(world: World, folder: Path) -> tuple[Result, set[int]]:
    dist.destroy_process_group()
    dist.init_process_group("simccl", device_id=torch.device("simgpu", world.rank))
    result = _fit(world, folder)
    dist.destroy_process_group()
    return result, simgpu.contexts()


def test_fit_in_a_group_bound_to_gpus_has_a_cpus_figures(tmp_path: Path) -> None:
    outcomes = run_on_gpus(2, _fit_in_own_group, tmp_path / "gpu")
    expected, _ = run_in_workers(2, _fit, tmp_path / "cpu")
    assert [contexts for _, contexts in outcomes] == [{0}, {1}]
    for result, _ in outcomes:
        assert result.loss == pytest.approx(expected.loss, rel=1e-9)
        assert result.metrics["confidence"] == pytest.approx(expected.metrics["confidence"], rel=1e-9)
        np.testing.assert_array_equal(result.metrics["recall"], expected.metrics["recall"])
        np.testing.assert_array_equal(result.confusion_matrix, expected.confusion_matrix)
