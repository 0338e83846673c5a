"""World-size invariance: with a fixed global batch, any number of workers takes the same steps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import losses, train_digits
from torch.utils.data import TensorDataset
from worker_group import run_in_workers

from lockstep.train import fit
from lockstep.world.world import World


def _losses_of(size: int, path: Path, **settings: object) -> list[float]:
    common = {"run_dir": path, "epochs": 1, "global_batch_size": 100, "log_every": 1, "lr": 0.2}
    run_in_workers(size, train_digits, "plain", None, None, {**common, **settings})
    return losses(path)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-5)])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"accumulate": 3, "clip_norm": 0.5, "shift": 1, "label_smoothing": 0.1},
        {"accumulate": 3, "mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1, "flip": True, "flip_alternate": True},
    ],
    ids=["plain", "accumulated", "mixed"],
)
def test_1_2_and_3_workers_have_the_same_losses(
    tmp_path: Path, precision: str, tolerance: float, extra: dict[str, object]
) -> None:
    runs = [_losses_of(size, tmp_path / str(size), precision=precision, **extra) for size in (1, 2, 3)]
    assert len(runs[0]) == 15  # 1,437 images in steps of 100, the last one of 37
    assert runs[0][-1] < 0.9 * runs[0][0]  # it does learn
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=tolerance, rel=0)


@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.2, "cutmix": 1.0, "rand_augment": 1, "accumulate": 2}])
def test_worker_without_a_share_of_the_last_step_changes_nothing(tmp_path: Path, mixed: dict[str, object]) -> None:
    runs = []
    for size in (1, 3):
        path = tmp_path / str(size)
        settings = {
            "run_dir": path,
            "epochs": 2,
            "global_batch_size": 12,
            "log_every": 1,
            "precision": "fp64",
            **mixed,
        }
        run_in_workers(size, train_digits, "plain", 25, 7, settings)  # steps of 12, 12 and 1
        runs.append(losses(path))
    assert len(runs[0]) == 6
    assert runs[1] == pytest.approx(runs[0], abs=1e-9, rel=0)


class Jittered(TensorDataset):
    """A user's data set with random augmentation of its own, from all three libraries that people use."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        image, label = super().__getitem__(index)
        return image + torch.rand(()) + random.random() + float(np.random.rand()), label


def _fit_jittered(world: World, path: Path, processes: int) -> None:
    images = torch.randn(60, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = Jittered(images, (images.mean((1, 2, 3)) > 0).long())
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    settings = {"precision": "fp64", "log_every": 1, "track": (), "loader_workers": processes, "lr": 0.1}
    fit(net, data, data, global_batch_size=12, epochs=2, run_dir=path, **settings)


def test_custom_augmentation_is_equal_for_any_number_of_workers(tmp_path: Path) -> None:
    runs = []
    for size, processes in ((1, 0), (2, 1), (3, 0)):
        path = tmp_path / str(size)
        run_in_workers(size, _fit_jittered, path, processes)
        runs.append(losses(path))
    assert len(runs[0]) == 10
    assert runs[0][:5] != runs[0][5:]
    for other in runs[1:]:
        assert other == pytest.approx(runs[0], abs=1e-9, rel=0)
