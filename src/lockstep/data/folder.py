"""A folder of images: FOLDER/train/CLASS/... and FOLDER/val/CLASS/... (or test), read as by ImageFolder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from lockstep.config import DataConfig
from lockstep.data.decode import Pixels, open_image, to_pixels
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
        train = _list_images(train_folder, numbers)
        unknown = {entry.name for entry in val_folder.iterdir() if entry.is_dir()} - set(classes)
        if unknown:
            raise DataError(f"{val_folder} has classes that {train_folder} lacks: {', '.join(sorted(unknown)[:5])}")
        val = _list_images(val_folder, {name: numbers[name] for name in classes if (val_folder / name).is_dir()})
    except FileNotFoundError as error:
        raise DataError(f"{error}; expected {folder}/train/CLASS/image.jpg") from None

    sampled = _look_at_one_image_a_class(train)
    if _belongs_in_memory(config, sampled, len(train) + len(val)):
        return _hold_in_memory(folder.name, tuple(classes), train, val, sampled, config)
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


def _look_at_one_image_a_class(split: FileSplit) -> list[tuple[tuple[int, int], str]]:
    """(size, mode) of the first readable image of each class; only the headers are read."""
    first = {label: path for path, label in zip(reversed(split.paths), reversed(split.labels), strict=True)}
    found = []
    for path in first.values():
        try:
            with Image.open(path) as image:
                found.append((image.size, image.mode))
        except OSError:
            continue
    return found


def _belongs_in_memory(config: DataConfig, sampled: list[tuple[tuple[int, int], str]], images: int) -> bool:
    sizes = {size for size, _ in sampled}
    if config.in_memory == "never" or not sizes:
        return False
    if config.in_memory == "always":
        if len(sizes) > 1 and config.image_size is None:
            raise ConfigError("--in-memory always: the images differ in size; add --image-size N to make them equal")
        return True
    width, height = next(iter(sizes))
    one_small_size = len(sizes) == 1 and width * height <= SMALL_PIXELS and config.image_size is None
    return one_small_size and images * width * height * 3 <= MEMORY_BYTES


def _hold_in_memory(
    name: str,
    classes: tuple[str, ...],
    train: FileSplit,
    val: FileSplit,
    sampled: list[tuple[tuple[int, int], str]],
    config: DataConfig,
) -> ImageData:
    size = (config.image_size, config.image_size) if config.image_size else sampled[0][0]
    channels = 1 if all(mode in ("L", "1") for _, mode in sampled) else 3
    left_out: list[str] = []
    splits = [_decode_all(split, channels, size, config, left_out) for split in (train, val)]
    mean, std = _statistics(splits[0].images)
    spec = InputSpec(channels, height=size[1], width=size[0], mean=mean, std=std)
    return ImageData(name, classes, splits[0], splits[1], spec, left_out)


def _decode_all(
    split: FileSplit, channels: int, size: tuple[int, int], config: DataConfig, left_out: list[str]
) -> MemorySplit:
    images = np.empty((len(split), size[1], size[0], channels), np.uint8)
    labels: list[int] = []
    for path, label in zip(split.paths, split.labels, strict=True):
        try:
            images[len(labels)] = _decode(path, channels, size, resize=config.image_size is not None)
        except CorruptImageError:
            if not config.skip_corrupt:
                raise
            left_out.append(str(path))
        else:
            labels.append(label)
    pixels = torch.from_numpy(images[: len(labels)]).permute(0, 3, 1, 2).contiguous()
    return MemorySplit(pixels, torch.tensor(labels, dtype=torch.int64))


def _decode(path: Path, channels: int, size: tuple[int, int], resize: bool) -> Pixels:
    image = open_image(path, channels)
    if image.size != size and not resize:
        raise CorruptImageError(
            f"{path} is {image.width} x {image.height}, but the set's other images are {size[0]} x {size[1]}; "
            f"add --image-size N to resize them, or --in-memory never to read them from disk"
        )
    return to_pixels(image, size=size)


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
