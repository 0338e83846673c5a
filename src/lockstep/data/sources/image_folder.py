"""A folder of images: FOLDER/train/CLASS/... and FOLDER/val/CLASS/... (or test), in the order of ImageFolder.

Unlike ImageFolder, this skips names that begin with a dot: .ipynb_checkpoints is not a class, and macOS's ._1.jpg not
an image. Source: `find_classes` and `make_dataset` in torchvision/datasets/folder.py. Listing a folder needs no torch,
which is slow to import.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.config.schema import DataConfig
from lockstep.data import decode
from lockstep.data.sets import EncodedSplit, FileSplit, ImageData, InputSpec, MemorySplit
from lockstep.errors import ConfigError, CorruptImageError, DataError

if TYPE_CHECKING:
    import torch

SMALL_PIXELS = 64 * 64  # images up to this area are decoded once and held in memory
HALF_RANGE = 1 << 15  # with lower values, at least one of 16 bits is not used
RANGE_SAMPLES = 32
MEMORY_BYTES = 4 << 30  # ... if all of them fit into this
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load(folder: Path, config: DataConfig) -> ImageData:
    """Load a folder of images; small images of one size are decoded into memory.

    Raises:
        DataError: The folder does not have the layout above, or contains no images.
        CorruptImageError: An image cannot be decoded, and `config.skip_corrupt` is off.
        ConfigError: `--in-memory always` without `--image-size`, but the images differ in size or color.
    """
    classes, train, val = list_images(folder)
    notes = ["there is only one class, so top-1 is always 100 %"] if len(classes) == 1 else []
    if ignored := Counter(train.ignored) + Counter(val.ignored):
        kinds = ", ".join(f"{count:,} {kind or 'without extension'}" for kind, count in ignored.most_common(5))
        notes.append(f"ignored files without an image extension: {kinds}")
    data = from_splits(name_of(folder), classes, train, val, config)
    return replace(data, notes=[*notes, *data.notes])


def from_splits(
    name: str, classes: tuple[str, ...], train: EncodedSplit, val: EncodedSplit, config: DataConfig
) -> ImageData:
    """Make a data set from splits of encoded images; small images of one size are decoded into memory.

    Raises:
        CorruptImageError: An image cannot be decoded, and `config.skip_corrupt` is off.
        ConfigError: `--in-memory always` without `--image-size`, but the images differ in size or color.
    """
    headers, notes = _first_headers(train), describe_range(train, config.bits)
    small = _all_small(config, headers, len(train) + len(val))
    if config.in_memory == "always" or (config.in_memory == "auto" and small):
        try:
            return replace(_hold_in_memory(name, classes, train, val, headers, config), notes=notes)
        except _MixedImagesError as error:
            if config.in_memory == "always":
                raise ConfigError(f"--in-memory always: {error}; add --image-size N to resize them") from None
    side = config.image_size or 224
    spec = InputSpec(3, side, side, IMAGENET_MEAN, IMAGENET_STD, crop_ratio=0.875, bits=config.bits)
    return ImageData(name, classes, train, val, spec, notes=notes)


def describe_range(split: EncodedSplit, bits: int | None = None) -> list[str]:
    """Return a line if 16-bit images, among the first of up to `RANGE_SAMPLES` classes, do not use the upper bits."""
    if bits is not None:
        return []  # the user has named the range
    _, first = np.unique(np.asarray(split.labels), return_index=True)
    found = []
    for sample in first[:RANGE_SAMPLES].tolist():
        try:
            found.append(decode.largest_value(split.read(sample)) or 0)
        except (OSError, ValueError, DataError):  # training will report the image
            continue
    top = max(found, default=0)
    if top <= 0 or HALF_RANGE <= top <= 0xFFFF:
        return []
    what = "nearly black" if top < 256 else "dark, with few levels" if top < HALF_RANGE else "clipped"
    return [
        f"16-bit gray images with values up to {top:,}, in the first images of the classes: they are read as {what}, "
        f"since 0 to 65,535 become 0 to 255; if their range is 0 to {(1 << top.bit_length()) - 1:,}, train or "
        f"pack them with --bits {top.bit_length()}"
    ]


class _MixedImagesError(Exception):
    """An image differs from the others in size, or is in color while they are gray."""


def _first_headers(split: EncodedSplit) -> set[decode.ImageHeader]:
    """Return the distinct headers of the first image of each class."""
    _, first = np.unique(np.asarray(split.labels), return_index=True)
    return {found for sample in first.tolist() if (found := decode.header(split, sample))}


def _all_small(config: DataConfig, headers: set[decode.ImageHeader], images: int) -> bool:
    sizes = {each.size for each in headers}
    if len(sizes) != 1 or config.image_size is not None:
        return False
    ((width, height),) = sizes
    return width * height <= SMALL_PIXELS and images * width * height * 3 <= MEMORY_BYTES


def _hold_in_memory(
    name: str,
    classes: tuple[str, ...],
    train: EncodedSplit,
    val: EncodedSplit,
    headers: set[decode.ImageHeader],
    config: DataConfig,
) -> ImageData:
    sizes = {each.size for each in headers}
    if config.image_size is None and len(sizes) != 1:
        raise _MixedImagesError(f"the images in {name} differ in size, or none of those checked can be read")
    width, height = (config.image_size, config.image_size) if config.image_size else sizes.pop()
    channels = 1 if headers and all(each.gray for each in headers) else 3
    spec = InputSpec(channels, height, width, (0.0,) * channels, (1.0,) * channels, bits=config.bits)
    left_out: list[str] = []
    splits = [_decode_all(split, spec, config, left_out) for split in (train, val)]
    mean, std = _statistics(splits[0].images)
    return ImageData(name, classes, splits[0], splits[1], replace(spec, mean=mean, std=std), left_out)


def _decode_all(split: EncodedSplit, spec: InputSpec, config: DataConfig, left_out: list[str]) -> MemorySplit:
    images = np.empty((len(split), spec.height, spec.width, spec.channels), np.uint8)
    labels: list[int] = []
    for sample, label in enumerate(split.labels):
        try:
            images[len(labels)] = _decode(split, sample, spec, resize=config.image_size is not None)
        except CorruptImageError as error:
            if not config.skip_corrupt:
                raise decode.unless_skipped(str(error)) from None
            left_out.append(split.name(sample))
        else:
            labels.append(int(label))
    if not labels:
        raise DataError(f"none of {len(split):,} images can be decoded, for example {split.name(0)}")
    import torch

    pixels = torch.from_numpy(images[: len(labels)]).permute(0, 3, 1, 2).contiguous()
    return MemorySplit(pixels, torch.tensor(labels, dtype=torch.int64, device="cpu"), split)


def _decode(split: EncodedSplit, sample: int, spec: InputSpec, resize: bool) -> decode.Pixels:
    file = split.image(sample)
    if spec.channels == 1 and (found := decode.header(split, sample)) and not found.gray:
        raise _MixedImagesError(f"{file} is in color, others are gray")
    try:
        return decode.evaluation_pixels(file, spec, resize)
    except decode.OtherSizeError as error:
        raise _MixedImagesError(f"{file} is {error}, others are {spec.width} x {spec.height}") from None


def _statistics(images: torch.Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the exact mean and standard deviation of each channel, for pixels of 0 to 1, from its histogram."""
    import torch

    levels = torch.arange(256, dtype=torch.float64, device="cpu") / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        shares = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = (shares * levels).sum()
        means.append(float(mean))
        deviations.append(max(1e-3, float((shares * (levels - mean) ** 2).sum().sqrt())))
    return tuple(means), tuple(deviations)


IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as in ImageFolder
MAX_WAYS = 100  # links to one folder; nested links could multiply without limit


def name_of(folder: Path) -> str:
    """Return a data set's name: its folder's absolute name, without resolving links."""
    return os.path.basename(os.path.abspath(folder))


def list_images(folder: Path) -> tuple[tuple[str, ...], FileSplit, FileSplit]:
    """Return a folder's classes, training files and validation files.

    A class needs training images. It may have no validation images, in an empty folder or without one.

    Raises:
        DataError: The folder is not FOLDER/train/CLASS/... and FOLDER/val/CLASS/... (or test), a class has no training
            images, or there are no validation images.
    """
    train_folder = folder / "train"
    if not train_folder.is_dir():
        raise DataError(f"{folder} has no train/; expected {folder}/train/CLASS/image.jpg{_found(folder)}")
    val_folder = validation_folder(folder)
    classes, present = _list_classes(train_folder), _list_classes(val_folder)
    unknown = sorted(set(present) - set(classes))
    if unknown:
        raise DataError(f"{val_folder} has classes that are missing from {train_folder}: {', '.join(unknown[:5])}")
    numbers = {name: number for number, name in enumerate(classes)}
    train, val = (
        _list_files(part, {name: numbers[name] for name in names})
        for part, names in ((train_folder, classes), (val_folder, present))
    )
    if without := set(numbers.values()) - set(train.labels):
        raise _no_images(train_folder / classes[min(without)])
    if not val.paths:
        raise _no_images(val_folder)
    return classes, train, val


def validation_folder(folder: Path) -> Path:
    """Return the folder of validation images: `val` or another common name.

    Raises:
        DataError: There is none.
    """
    for name in ("val", "test", "valid", "validation"):
        if (folder / name).is_dir():
            return folder / name
    raise DataError(f"{folder} has neither val/ nor test/; expected {folder}/val/CLASS/image.jpg{_found(folder)}")


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _found(folder: Path) -> str:
    names = [f"{name}/" for name in _folders(folder)]
    more = ", ..." if len(names) > 5 else ""
    return f"; found {', '.join(names[:5])}{more}" if names else "; found no folders"


def _list_classes(folder: Path) -> tuple[str, ...]:
    classes = tuple(_folders(folder))
    if not classes:
        raise DataError(f"{folder} has no class folders; expected {folder}/CLASS/image.jpg")
    return classes


def _list_files(folder: Path, numbers: dict[str, int]) -> FileSplit:
    paths: list[Path] = []
    labels: list[int] = []
    ignored: Counter[str] = Counter()
    for name in sorted(numbers):
        images = _find_images(folder / name, ignored)
        paths += images
        labels += [numbers[name]] * len(images)
    return FileSplit(paths, labels, ignored)


def images_in(folder: Path) -> list[Path]:
    """Return the image files in a folder, recursively.

    Raises:
        DataError: There are no images.
    """
    images = _find_images(folder, Counter())
    if not images:
        raise _no_images(folder)
    return images


def _no_images(folder: Path) -> DataError:
    return DataError(f"{folder} has no images ({' '.join(IMAGE_EXTENSIONS)})")


def _find_images(folder: Path, ignored: Counter[str]) -> list[Path]:
    """Return the image files in a folder, recursively; count the other files in `ignored`, by extension."""
    images: list[Path] = []
    for current, files in sorted(_walk(folder)):
        for file in sorted(file for file in files if not file.startswith(".")):
            if file.lower().endswith(IMAGE_EXTENSIONS):
                images.append(Path(current, file))
            else:
                ignored[os.path.splitext(file)[1].lower()] += 1
    return images


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Walk a folder recursively and yield each folder with its files. Follows links, except to a parent folder."""
    ways: Counter[tuple[int, int]] = Counter()
    outer = {top, *top.absolute().parents, *top.resolve().parents}  # have images of other classes
    above = {str(top): frozenset(_identity(str(each)) for each in outer)}
    for current, inner, files in os.walk(top, followlinks=True):
        yield current, files
        here = above.pop(current)
        entered = [(each, _identity(os.path.join(current, each))) for each in inner if not each.startswith(".")]
        inner[:] = [each for each, identity in entered if identity not in here]
        for each, identity in entered:
            if identity not in here:
                above[os.path.join(current, each)] = here | {identity}
                ways[identity] += 1
                if ways[identity] > MAX_WAYS:
                    link = os.path.join(current, each)
                    raise DataError(f"{link} is one of more than {MAX_WAYS} links to the same folder; remove it")


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino
