"""Loaders: with a fixed global batch, any number of workers sees the same samples, augmented the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_folder
from torch.utils.data import TensorDataset

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data import catalog
from lockstep.data.loaders import EvalLoader, TrainLoader, reader_for
from lockstep.data.readers import Placement
from lockstep.data.sets import Batch, EncodedSplit, InputSpec, MemorySplit, Split, UserSplit
from lockstep.data.sharding import Sharding
from lockstep.data.sources import image_folder
from lockstep.data.transforms import Mixing, mixes
from lockstep.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

CPU = torch.device("cpu")
EPOCHS = (0, 1)
SAMPLES, GLOBAL_BATCH = 25, 12  # steps of 12, 12 and 1: with 2 or 3 workers, some have no share of the last


def _noise(*shape: int, count: int = SAMPLES) -> MemorySplit:
    images = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return MemorySplit(images, torch.arange(count))


class _First(EncodedSplit):
    """The first images of a split, each with its number as its label, so that a batch tells which samples it has."""

    def __init__(self, split: EncodedSplit):
        self._split = split
        self.labels = range(SAMPLES)

    def name(self, sample: int) -> str:
        return self._split.name(sample)

    def read(self, sample: int) -> bytes | memoryview:
        return self._split.read(sample)


def _spec(height: int, width: int, channels: int) -> InputSpec:
    return InputSpec(channels, height, width, (0.4,) * channels, (0.3,) * channels)


def _epochs(split: Split, spec: InputSpec, size: int, start_step: int = 0, **options: Any) -> list[list[list[Batch]]]:
    """The batches of some epochs: by rank, epoch and step."""
    ranks = []
    for rank in range(size):
        dtype = options.get("dtype", torch.float32)
        augment, processes = options.get("augment", AugmentConfig()), options.get("processes", 0)
        reader = reader_for(split, spec, Placement(CPU, dtype), augment, seed=3, processes=processes)
        sharding = Sharding(len(split), GLOBAL_BATCH, rank, size, seed=3, together=2 if mixes(augment) else 1)
        loader = TrainLoader(reader, sharding, CPU, Mixing(augment, seed=3))
        ranks.append([list(loader.epoch(epoch, start_step)) for epoch in EPOCHS])
        reader.close()
    return ranks


def _others(batch: Batch) -> torch.Tensor:
    return batch.labels if batch.others is None else batch.others


def _shares(batch: Batch) -> torch.Tensor:
    return torch.ones(len(batch.labels)) if batch.shares is None else batch.shares.float()


def _assert_same_steps(alone: list[list[Batch]], workers: list[list[list[Batch]]]) -> None:
    """The batches that `workers` have in a step are, one after the other, the batch that one worker has."""
    fillers = 0
    for epoch, steps in enumerate(alone):
        assert [len(batch.labels) for batch in steps] == [12, 12, 1]
        for step, whole in enumerate(steps):
            parts = [worker[epoch][step] for worker in workers]
            for part in parts:
                if part.weights is not None:
                    assert part.weights.tolist() == [0.0]
                    assert part.images.shape == (1, *whole.images.shape[1:])
                    assert torch.isfinite(part.images).all()
                    fillers += 1
            shares = [part for part in parts if part.weights is None]
            assert whole.weights is None
            if whole.others is not None:
                assert torch.equal(torch.cat([_others(part) for part in shares]), whole.others)
                assert torch.equal(torch.cat([_shares(part) for part in shares]), _shares(whole))
            assert torch.equal(torch.cat([part.labels for part in shares]), whole.labels)
            assert torch.equal(torch.cat([part.images for part in shares]), whole.images)
    assert fillers == (len(workers) - 1) * len(EPOCHS)
    if any(batch.others is not None for batch in alone[0]):
        return
    orders = [torch.cat([batch.labels for batch in steps]).tolist() for steps in alone]
    assert [sorted(order) for order in orders] == [list(range(SAMPLES))] * len(EPOCHS)
    assert orders[0] != orders[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "augment"),
    [
        ((1, 8, 8), AugmentConfig()),
        ((3, 12, 16), AugmentConfig(shift=2, flip=True)),
        ((3, 12, 16), AugmentConfig(rotate=15.0, zoom=0.2, shear=10.0)),
        ((3, 16, 12), AugmentConfig(shift=2, shift_padding="reflect", flip=True, rotate=15.0, zoom=0.2, cutout=5)),
        ((3, 12, 16), AugmentConfig(flip=True, flip_alternate=True)),
        ((1, 12, 16), AugmentConfig(rand_augment=2)),
        ((3, 12, 16), AugmentConfig(rand_augment=2, rand_augment_magnitude=15, mixup=0.2, cutmix=1.0)),
        ((1, 12, 16), AugmentConfig(flip=True, trivial_augment=True, random_erasing=1.0)),
    ],
    ids=["plain", "shift and flip", "warp", "everything", "alternate", "rand augment", "mixed", "trivial and erased"],
)
def test_1_2_and_3_workers_see_the_same_images_held_in_memory(
    shape: tuple[int, int, int], augment: AugmentConfig, dtype: torch.dtype
) -> None:
    split, spec = _noise(*shape), _spec(shape[1], shape[2], shape[0])
    (alone,) = _epochs(split, spec, 1, augment=augment, dtype=dtype)
    assert alone[0][0].images.dtype == dtype
    if augment != AugmentConfig():
        pixels = []
        for steps in alone:
            order = torch.cat([batch.labels for batch in steps]).argsort()
            pixels.append(torch.cat([batch.images for batch in steps])[order])
        assert (pixels[0] != pixels[1]).flatten(1).any(1).float().mean() > 0.8  # augmented, and anew in each epoch
    for size in (2, 3):
        _assert_same_steps(alone, _epochs(split, spec, size, augment=augment, dtype=dtype))


@pytest.mark.parametrize("processes", [0, 2])
def test_1_2_and_3_workers_see_the_same_mixed_images(new_folder: Callable[..., Path], processes: int) -> None:
    path = new_folder(sizes=((40, 30), (24, 36), (31, 31)), train=13, val=1)
    data = image_folder.load(path, DataConfig(dataset=str(path), image_size=14))
    split = _First(data.train)
    changes = {"trivial_augment": True, "random_erasing": 0.5} if processes else {"rand_augment": 2}
    augment = AugmentConfig(flip=True, flip_alternate=True, mixup=0.2, cutmix=1.0, **changes)
    (alone,) = _epochs(split, data.input, 1, augment=augment)
    for size in (2, 3):
        options = {"augment": augment, "processes": processes}
        _assert_same_steps(alone, _epochs(split, data.input, size, **options))


def test_a_reflecting_shift_as_wide_as_the_image_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--shift 4: .*reflect, must be less than the shorter image side, 4"):
        reader_for(_noise(1, 4, 6), _spec(4, 6, 1), Placement(CPU), AugmentConfig(shift=4, shift_padding="reflect"))


def test_custom_set_is_mixed_but_not_resized_or_augmented() -> None:
    images = torch.rand(SAMPLES, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    split, spec = UserSplit(TensorDataset(images, torch.arange(SAMPLES))), _spec(4, 4, 2)
    augment = AugmentConfig(mixup=0.2)
    (alone,) = _epochs(split, spec, 1, augment=augment)
    assert alone[0][0].others is not None
    for size in (2, 3):
        _assert_same_steps(alone, _epochs(split, spec, size, augment=augment))
    with pytest.raises(ConfigError, match="--rand-augment, --random-erasing: not available with a custom data set"):
        reader_for(split, spec, Placement(CPU), AugmentConfig(rand_augment=2, random_erasing=0.1))


@pytest.mark.parametrize("kind", ["memory", "files", "files, by processes", "packed", "user"])
def test_any_number_of_workers_enters_an_epoch_at_any_step(
    kind: str, new_folder: Callable[..., Path], tmp_path: Path
) -> None:
    if kind == "memory":
        split: Split = _noise(3, 8, 8)
    elif kind == "user":
        split = UserSplit(TensorDataset(torch.rand(SAMPLES, 3, 8, 8), torch.arange(SAMPLES)))
    else:
        path = new_folder(sizes=((20, 14), (12, 18)), train=13, val=1)
        if kind == "packed":
            path = pack_folder(path, tmp_path / "packed")
        found = catalog.load(DataConfig(dataset=str(path), in_memory="never")).train
        split = _First(found)
    augment = AugmentConfig(shift=1, flip=True) if kind == "memory" else AugmentConfig(flip=True, min_crop=0.3)
    has_processes = "processes" in kind  # they do not know of the workers, and take time to start
    options: dict[str, Any] = {"augment": augment, "processes": 2 if has_processes else 0}
    (whole,) = _epochs(split, _spec(8, 8, 3), 1, **options)
    for size in (2,) if has_processes else (1, 2, 3):
        _assert_same_steps(whole, _epochs(split, _spec(8, 8, 3), size, **options))
    for size, start in [(2, 1)] if has_processes else product((1, 2, 3), (1, 2, 3)):
        entered = _epochs(split, _spec(8, 8, 3), size, start, **options)
        for epoch, steps in enumerate(whole):
            assert [len(worker[epoch]) for worker in entered] == [3 - start] * size
            for step, expected in enumerate(steps[start:]):
                parts = [worker[epoch][step] for worker in entered]
                shares = [part for part in parts if part.weights is None]
                assert torch.equal(torch.cat([part.labels for part in shares]), expected.labels)
                assert torch.equal(torch.cat([part.images for part in shares]), expected.images)


@pytest.mark.parametrize("samples", [1, 2, 25])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_has_each_sample_once_as_it_is(samples: int, size: int) -> None:
    split, spec = _noise(3, 8, 8, count=samples), _spec(8, 8, 3)
    augment = AugmentConfig(shift=2, flip=True, rotate=20.0, cutout=4)
    seen = []
    for rank in range(size):
        reader = reader_for(split, spec, Placement(CPU, torch.float64), augment)
        loader = EvalLoader(reader, samples, 4, rank, size, CPU)
        seen += [*loader, *loader]  # it can be gone through again
    assert sorted(torch.cat([batch.labels for batch in seen]).tolist()) == sorted([*range(samples)] * 2)
    for batch in seen:
        assert batch.weights is None
        assert len(batch.labels) <= 4
        expected = (split.images[batch.labels].double() / 255 - 0.4) / 0.3
        assert torch.allclose(batch.images, expected, atol=1e-12)


def test_filler_of_a_damaged_image_keeps_an_idle_worker_running(new_folder: Callable[..., Path]) -> None:
    """With skip_corrupt, a worker that only lends a sample of weight 0 goes on, and has weight 0 all the same."""
    path = new_folder(sizes=((40, 30),), train=1, val=1)
    data = image_folder.load(path, DataConfig(dataset=str(path), in_memory="never"))
    data.train.paths[0].write_bytes(b"")
    reader = reader_for(data.train, _spec(14, 14, 3), Placement(CPU), AugmentConfig(), skip_corrupt=True)
    loader = TrainLoader(reader, Sharding(2, 2, rank=0, size=3), CPU)
    (batch,) = loader.epoch(0)
    assert batch.weights.tolist() == [0.0]
    assert batch.images.shape == (1, 3, 14, 14)
    assert np.isfinite(batch.images.numpy()).all()
