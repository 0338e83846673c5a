"""Every model of the zoo through the whole trainer, on real CIFAR-10 images; minutes, so on demand (`-m long`)."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import all_finite, losses
from worker_group import run_in_workers

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.models import registry
from lockstep.models.registry import ZOO
from lockstep.seeding import seed_all
from lockstep.train import setup
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

ARCHIVE = Path(__file__).parents[3] / "shared" / "data" / "cifar10-jpeg.zip"
NAMES = [name for name, entry in ZOO.items() if entry.side == 32]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not ARCHIVE.exists(), reason="the shared CIFAR-10 images are not here"),
]


def _cifar(images_of_a_class: int) -> ImageData:
    """The first images of each class, for training and validation alike."""
    with zipfile.ZipFile(ARCHIVE) as archive:
        names = sorted(name for name in archive.namelist() if "/train/" in name and name.endswith(".jpg"))
        classes = sorted({name.split("/")[2] for name in names})
        chosen = [name for name in names if int(Path(name).stem) < images_of_a_class]
        pixels = [np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in chosen]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor([classes.index(name.split("/")[2]) for name in chosen])
    split = MemorySplit(images, labels)
    return ImageData("cifar10", tuple(classes), split, split, InputSpec(3, 32, 32, (0.5,) * 3, (0.25,) * 3))


def _train(world: World, name: str, images: int, settings: dict[str, Any]) -> None:
    data = _cifar(images)
    config = configure(lr=0.01, lr_scaling="none", log_every=1, track=(), epochs=1, channels_last=True, **settings)
    seed_all(0, 0, 0)
    model = registry.build(name, 10, 3, 32)
    setup.calibrate(model, name, data)
    run_with(config, world, data, model)


@pytest.mark.parametrize("precision", ["O0", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_two_workers_train_three_steps(tmp_path: Path, name: str, precision: str) -> None:
    settings = {"precision": precision, "batch_size": 5, "run_dir": tmp_path}
    run_in_workers(2, _train, name, 3, settings)
    assert len(losses(tmp_path)) == 3
    assert all_finite(tmp_path)


@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", NAMES)
def test_one_worker_takes_a_step_in_fp16(tmp_path: Path, name: str, precision: str) -> None:
    settings = {"precision": precision, "batch_size": 2, "max_steps": 1, "run_dir": tmp_path, "loss_scale": 128.0}
    run_in_workers(1, _train, name, 1, settings)
    (loss,) = losses(tmp_path)
    assert 1 < loss < 10
    assert all_finite(tmp_path)
