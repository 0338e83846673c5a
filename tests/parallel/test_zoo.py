"""Every model of the zoo takes real steps: replicas stay equal to the bit, and the whole trainer learns CIFAR-10."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from runs import all_finite, losses
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worker_group import run_in_workers

from lockstep.data.sets import ImageData, InputSpec, MemorySplit
from lockstep.models import registry
from lockstep.models.registry import ZOO
from lockstep.run.data_parallel import settle_buckets
from lockstep.seeding import seed_all
from lockstep.train import network
from lockstep.train.fit import configure
from lockstep.train.run import run_with
from lockstep.world.world import World

LARGE = ["resnet101", "dpn92"]
OTHERS = [name for name in ZOO if name not in LARGE]
STEPS, IMAGES = 2, 2


def _digest(model: nn.Module) -> str:
    with torch.no_grad():
        weights = [parameter.contiguous().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()


def _train(world: World, name: str, precision: str) -> tuple[str, str]:
    """Two steps on images of the worker's own; digests of the weights before and after."""
    entry = ZOO[name]
    torch.manual_seed(world.rank)  # DDP takes rank 0's weights
    model = registry.build(name, 10, entry.in_channels, entry.side).to(memory_format=torch.channels_last)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    settle_buckets(replica)  # as the strategy ddp does
    before = _digest(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        images = torch.randn(IMAGES, entry.in_channels, entry.side, entry.side)
        labels = torch.randint(10, (IMAGES,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(replica(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, _digest(model)


def _train_all(world: World, names: list[str], precision: str) -> dict[str, tuple[str, str]]:
    return {name: _train(world, name, precision) for name in names}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["O0", "bf16"])
@pytest.mark.parametrize("names", [OTHERS[::2], OTHERS[1::2], LARGE])  # some 10 s each, and a job has 120
def test_two_workers_keep_equal_replicas_of_every_model(names: list[str], precision: str) -> None:
    first, second = run_in_workers(2, _train_all, names, precision)
    assert len(first) == len(names)
    assert first == second
    assert all(before != after for before, after in first.values())


NAMES = [name for name, entry in ZOO.items() if entry.side == 32]


def _cifar(archive_path: Path, images_of_a_class: int) -> ImageData:
    """The first images of each class, for training and validation alike."""
    with zipfile.ZipFile(archive_path) as archive:
        names = sorted(name for name in archive.namelist() if "/train/" in name and name.endswith(".jpg"))
        classes = sorted({name.split("/")[2] for name in names})
        chosen = [name for name in names if int(Path(name).stem) < images_of_a_class]
        pixels = [np.asarray(Image.open(io.BytesIO(archive.read(name)))) for name in chosen]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor([classes.index(name.split("/")[2]) for name in chosen])
    split = MemorySplit(images, labels)
    return ImageData("cifar10", tuple(classes), split, split, InputSpec(3, 32, 32, (0.5,) * 3, (0.25,) * 3))


def _train_on_cifar(world: World, folder: Path, name: str, images: int, settings: dict[str, Any]) -> None:
    data = _cifar(folder / "cifar10-jpeg.zip", images)
    config = configure(lr=0.01, lr_scaling="none", log_every=1, track=(), epochs=1, channels_last=True, **settings)
    seed_all(0, 0, 0)
    model = registry.build(name, 10, 3, 32)
    network.calibrate(model, name, data)
    run_with(config, world, data, model)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["O0", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_two_workers_train_three_steps(tmp_path: Path, shared_data: Path, name: str, precision: str) -> None:
    settings = {"precision": precision, "batch_size": 5, "run_dir": tmp_path}
    run_in_workers(2, _train_on_cifar, shared_data, name, 3, settings)
    assert len(losses(tmp_path)) == 3
    assert all_finite(tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", NAMES)
def test_one_worker_takes_a_step_in_fp16(tmp_path: Path, shared_data: Path, name: str, precision: str) -> None:
    settings = {"precision": precision, "batch_size": 2, "max_steps": 1, "run_dir": tmp_path, "loss_scale": 128.0}
    run_in_workers(1, _train_on_cifar, shared_data, name, 1, settings)
    (loss,) = losses(tmp_path)
    assert 1 < loss < 10
    assert all_finite(tmp_path)
