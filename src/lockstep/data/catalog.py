"""The catalog of named data sets, and how to load them. torch is imported only on loading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.schema import DataConfig
from lockstep.config.values import resolve
from lockstep.errors import ConfigError, DataError
from lockstep.files.staged import staged

if TYPE_CHECKING:
    from lockstep.data.sets import ImageData


@dataclass(frozen=True)
class DataSetEntry:
    """One row of `lockstep datasets`. `fetched`: whether `lockstep data get` can download it."""

    samples: str
    images: str
    about: str
    fetched: bool = False


NAMED = {
    "digits": DataSetEntry("1,437 + 360", "8 x 8 gray", "embedded"),
    "mnist": DataSetEntry("60,000 + 10,000", "28 x 28 gray", "digits", fetched=True),
    "fashion-mnist": DataSetEntry("60,000 + 10,000", "28 x 28 gray", "clothing", fetched=True),
    "cifar10": DataSetEntry("50,000 + 10,000", "32 x 32 color", "10 classes", fetched=True),
    "cifar100": DataSetEntry("50,000 + 10,000", "32 x 32 color", "100 classes", fetched=True),
    "imagenet": DataSetEntry("1,281,167 + 50,000", "photographs", "your own copy"),
    "synthetic": DataSetEntry("1,024 + 256", "noise", "for measuring"),
}

SYNTHETIC_CLASSES = 1000
SYNTHETIC_TRAIN, SYNTHETIC_VAL = 1024, 256


def load(config: DataConfig, download: bool = False) -> ImageData:
    """Load the data set that a configuration names.

    Raises:
        DataError: It is unknown (the message names the closest match), missing, or malformed.
        ConfigError: A setting does not apply to it.
    """
    source = config.source
    if config.bits and (config.data or (source in NAMED and source != "imagenet")):
        raise ConfigError(f"--bits {config.bits}: only for folders of images and packs; leave it out")
    if config.data:
        return _load_custom(config.data)
    if source == "digits":
        from lockstep.data.sources import digits

        return digits.load()
    if source == "synthetic":
        return _synthetic(config.image_size or 224)
    if source in NAMED and NAMED[source].fetched:
        from lockstep.data.sources import torchvision_sets

        return torchvision_sets.load(source, Path(staged(config.data_dir)), download)

    from lockstep.data.sources import image_folder, pack_reader

    path = locate(config)
    return pack_reader.load(path, config) if pack_reader.is_packed(path) else image_folder.load(path, config)


def locate(config: DataConfig) -> Path:
    """Return the data set folder that a configuration names, or its copy on this host: images or a pack.

    Raises:
        DataError: The folder does not exist.
    """
    path = config.data_dir / "imagenet" if config.source == "imagenet" else Path(config.source)
    if path.is_dir():
        return Path(staged(path))
    if config.source == "imagenet":
        raise DataError(
            f"{path} does not exist; ImageNet cannot be downloaded automatically: put its train/ and val/ class "
            f"folders there (`lockstep data prepare imagenet` creates them), or pass a folder: lockstep train FOLDER"
        )
    if path.exists():
        raise DataError(f"{path} is a file; pass the folder that contains train/ and val/")
    if len(path.parts) > 1 or config.source.startswith("."):
        raise DataError(f"{path} does not exist; pass the folder that contains train/ and val/")
    near = get_close_matches(config.source, NAMED, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known data sets: {', '.join(NAMED)}"
    raise DataError(f"{config.source!r} is not a known data set or folder; {hint}")


def check(config: DataConfig) -> None:
    """Check, before any worker starts, that the data set exists. Loads nothing.

    Raises:
        DataError: The name is unknown, or the folder does not exist.
    """
    if not config.data and not (config.source in NAMED and config.source != "imagenet"):
        locate(config)


def _load_custom(reference: str) -> ImageData:
    from lockstep.data.sets import ImageData, describe_custom

    result = resolve("--data", reference)()
    if isinstance(result, ImageData):
        return result
    if not (isinstance(result, tuple) and len(result) == 2):
        raise DataError(f"--data {reference} must return (training set, validation set); it returned {result!r}")
    return describe_custom(reference, *result)


def _synthetic(side: int) -> ImageData:
    """Return images of noise, uint8 [3, side, side], with random labels, to measure training without input.

    Raises:
        DataError: The machine has too little memory.
    """
    import torch

    from lockstep.data.sets import ImageData, InputSpec, MemorySplit

    needed = 3 * side**2 * (SYNTHETIC_TRAIN + SYNTHETIC_VAL)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise DataError(
            f"--image-size {side}: synthetic images of {side} x {side} pixels need {needed / 1e9:,.0f} GB of memory, "
            f"but this machine has {memory / 1e9:,.0f} GB; choose a smaller size"
        )
    generator = torch.Generator().manual_seed(0)

    def split(samples: int) -> MemorySplit:
        images = torch.randint(0, 256, (samples, 3, side, side), generator=generator, dtype=torch.uint8, device="cpu")
        return MemorySplit(images, torch.randint(0, SYNTHETIC_CLASSES, (samples,), generator=generator, device="cpu"))

    names = tuple(f"class-{number:03d}" for number in range(SYNTHETIC_CLASSES))
    half = (0.5, 0.5, 0.5)
    return ImageData(
        "synthetic", names, split(SYNTHETIC_TRAIN), split(SYNTHETIC_VAL), InputSpec(3, side, side, half, half)
    )
