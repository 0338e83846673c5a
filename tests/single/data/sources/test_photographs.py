"""Real photographs through the pipeline, against torchvision's transforms and Pillow."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean

import numpy as np
import numpy.typing as npt
import pytest
import torch
from distributions import distance, largest_distance
from PIL import Image
from torchvision.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

from lockstep.config.schema import AugmentConfig, DataConfig
from lockstep.data.decode import center, evaluation_pixels
from lockstep.data.sets import FileSplit, ImageData
from lockstep.data.sources import image_folder
from lockstep.data.stream_reader import BatchRequest, FileSource

Figures = npt.NDArray[np.float64]
EPOCHS = 5


@pytest.fixture(scope="module")
def photographs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    scratch = tmp_path_factory.mktemp("photographs")
    subprocess.run(["tar", "-xf", shared_data / "imagenet-sample.tar", "-C", scratch], check=True)
    path = scratch / "imagenet-sample"
    return image_folder.load(path, DataConfig(dataset=str(path)))


def _files(split: object) -> FileSplit:
    assert isinstance(split, FileSplit)
    return split


def test_evaluations_pixels_are_those_of_pillow(photographs: ImageData) -> None:
    spec, split = photographs.input, _files(photographs.val)
    differences = []
    for path in split.paths:
        with Image.open(path) as file:
            image = file.convert("RGB")
        ours = evaluation_pixels(path, spec).astype(int)
        size = (spec.width, spec.height)
        theirs = image.resize(size, Image.Resampling.BILINEAR, box=center(spec, *image.size))
        differences.append(np.abs(ours - np.asarray(theirs)).mean())
    assert mean(differences) < 0.1  # of 255
    assert max(differences) < 2


def _ours(photographs: ImageData) -> Figures:
    split = _files(photographs.train)
    source = FileSource(split, photographs.input, AugmentConfig(flip=True), seed=0)
    rows = []
    for epoch in range(EPOCHS):
        for samples in np.array_split(np.arange(len(split)), 12):
            rows += [_figures(image) for image in source.__getitems__(BatchRequest(epoch, samples)).images]
    return np.array(rows)


def _torchvisions(photographs: ImageData) -> Figures:
    change = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    rows = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for path in _files(photographs.train).paths:
            with Image.open(path) as file:
                image = file.convert("RGB")
            made = [np.asarray(change(image)) for _ in range(EPOCHS)]
            rows += [_figures(torch.from_numpy(pixels.copy()).permute(2, 0, 1)) for pixels in made]
    return np.array(rows)


def _figures(image: torch.Tensor) -> list[float]:
    """Of a crop, [3, H, W]: mean, variance, and how much brighter and busier the left half is than the right."""
    pixels = image.float()
    left, right = pixels[:, :, :112], pixels[:, :, 112:]
    roughness = (pixels.diff(dim=2).abs().mean(), pixels.diff(dim=1).abs().mean())
    return [
        *(float(x) for x in (pixels.mean(), pixels.var(), left.mean() - right.mean(), left.var() - right.var())),
        *(float(x) for x in roughness),
    ]


def test_training_pixels_are_distributed_as_torchvisions(photographs: ImageData) -> None:
    ours, theirs = _ours(photographs), _torchvisions(photographs)
    bound = largest_distance(len(ours), len(theirs))
    for name, a, b in zip(("mean", "variance", "brighter", "busier", "across", "down"), ours.T, theirs.T, strict=True):
        assert distance(a, b) < bound, name
    assert ours[:, 0].mean() == pytest.approx(theirs[:, 0].mean(), rel=0.01)
    assert ours[:, 1].mean() == pytest.approx(theirs[:, 1].mean(), rel=0.03)
