"""A folder of images: FOLDER/train/CLASS/... and FOLDER/val/CLASS/... (or test), read as by ImageFolder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from lockstep.config import DataConfig
from lockstep.data.decode import GREY_MODES, Pixels, decode, evaluation_pixels
from lockstep.data.sets import FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.errors import ConfigError, CorruptImageError, DataError

SMALL_PIXELS = 64 * 64  # images up to this area are decoded once and kept
MEMORY_BYTES = 4 << 30  # ... if all of them fit here
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(folder: Path, config: DataConfig) -> ImageData:
    """Read a folder's tree; small images of one size are decoded into memory.

    Raises:
        DataError: The folder is not laid out as above, or holds no images.
        CorruptImageError: An image cannot be decoded, and `config.skip_corrupt` is off.
        ConfigError: Flags that this folder cannot follow.
    """
    train_folder, val_folder = folder / "train", _validation_folder(folder)
    if not train_folder.is_dir():
        raise DataError(f"{folder} has no train/ folder; expected {folder}/train/CLASS/image.jpg")
    try:
        classes, numbers = find_classes(train_folder)
        present, _ = find_classes(val_folder)
        unknown = set(present) - set(classes)
        if unknown:
            raise DataError(f"{val_folder} has classes that {train_folder} lacks: {', '.join(sorted(unknown)[:5])}")
        train = _list_images(train_folder, numbers)
        val = _list_images(val_folder, {name: numbers[name] for name in present})
    except FileNotFoundError as error:
        raise DataError(f"{error}; expected {folder}/train/CLASS/image.jpg") from None

    looks = _look_at_first_of_each_class(train)
    small = _all_small(config, looks, len(train) + len(val))
    if config.in_memory == "always" or (config.in_memory == "auto" and small):
        try:
            return _hold_in_memory(folder.name, tuple(classes), train, val, looks, config)
        except _NotAlikeError as error:
            if config.in_memory == "always":
                raise ConfigError(f"--in-memory always: {error}; add --image-size N to make them equal") from None
    side = config.image_size or 224
    spec = InputSpec(3, side, side, IMAGENET_MEAN, IMAGENET_STD, crop_ratio=0.875)
    return ImageData(folder.name, tuple(classes), train, val, spec)


def _validation_folder(folder: Path) -> Path:
    for name in ("val", "test", "valid", "validation"):
        if (folder / name).is_dir():
            return folder / name
    raise DataError(f"{folder} has neither val/ nor test/; expected {folder}/val/CLASS/image.jpg")


def _list_images(folder: Path, numbers: dict[str, int]) -> FileSplit:
    pairs = make_dataset(folder, numbers, extensions=IMG_EXTENSIONS)
    return FileSplit([Path(path) for path, _ in pairs], [label for _, label in pairs])


class _NotAlikeError(Exception):
    """An image differs from the others in size, or is coloured where they are grey."""


@dataclass(frozen=True)
class _Look:
    """What an image's header tells."""

    size: tuple[int, int]
    grey: bool


def _look_at_first_of_each_class(split: FileSplit) -> set[_Look]:
    first = {label: path for path, label in zip(reversed(split.paths), reversed(split.labels), strict=True)}
    looks = set()
    for path in first.values():
        with suppress(OSError, Image.DecompressionBombError), Image.open(path) as image:
            looks.add(_Look(image.size, image.mode in GREY_MODES))
    return looks


def _all_small(config: DataConfig, looks: set[_Look], images: int) -> bool:
    sizes = {look.size for look in looks}
    if len(sizes) != 1 or config.image_size is not None:
        return False
    ((width, height),) = sizes
    return width * height <= SMALL_PIXELS and images * width * height * 3 <= MEMORY_BYTES


def _hold_in_memory(
    name: str, classes: tuple[str, ...], train: FileSplit, val: FileSplit, looks: set[_Look], config: DataConfig
) -> ImageData:
    sizes = {look.size for look in looks}
    if config.image_size is None and len(sizes) != 1:
        raise _NotAlikeError(f"the images in {name} differ in size, or none of those looked at can be read")
    width, height = (config.image_size, config.image_size) if config.image_size else sizes.pop()
    channels = 1 if looks and all(look.grey for look in looks) else 3
    spec = InputSpec(channels, height, width, mean=(0.0,) * channels, std=(1.0,) * channels)
    left_out: list[str] = []
    splits = [_decode_all(split, spec, config, left_out) for split in (train, val)]
    mean, std = _statistics(splits[0].images)
    return ImageData(name, classes, splits[0], splits[1], replace(spec, mean=mean, std=std), left_out)


def _decode_all(split: FileSplit, spec: InputSpec, config: DataConfig, left_out: list[str]) -> MemorySplit:
    images = np.empty((len(split), spec.height, spec.width, spec.channels), np.uint8)
    labels: list[int] = []
    for path, label in zip(split.paths, split.labels, strict=True):
        try:
            images[len(labels)] = _decode(path, spec, resize=config.image_size is not None)
        except CorruptImageError:
            if not config.skip_corrupt:
                raise
            left_out.append(str(path))
        else:
            labels.append(label)
    if not labels:
        raise DataError(f"none of the images under {split.paths[0].parent.parent} can be decoded")
    pixels = torch.from_numpy(images[: len(labels)]).permute(0, 3, 1, 2).contiguous()
    return MemorySplit(pixels, torch.tensor(labels, dtype=torch.int64))


def _decode(path: Path, spec: InputSpec, resize: bool) -> Pixels:
    if spec.channels == 1:
        _check_grey(path)
    if resize:
        return evaluation_pixels(path, spec)
    pixels = decode(path, spec.channels)
    height, width = pixels.shape[:2]
    if (height, width) != (spec.height, spec.width):
        raise _NotAlikeError(f"{path} is {width} x {height}, others are {spec.width} x {spec.height}")
    return pixels


def _check_grey(path: Path) -> None:
    with suppress(OSError, Image.DecompressionBombError), Image.open(path) as image:
        if image.mode not in GREY_MODES:
            raise _NotAlikeError(f"{path} is coloured, others are grey")


def _statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, scaled to 0 to 1, exactly, from its histogram."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (shares * levels).sum()
        means.append(float(mean))
        deviations.append(max(1e-3, float((shares * (levels - mean) ** 2).sum().sqrt())))
    return tuple(means), tuple(deviations)
