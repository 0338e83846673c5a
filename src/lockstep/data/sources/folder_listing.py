"""List a folder of images in the order of torchvision's ImageFolder. Without torch, which is slow to import.

Unlike ImageFolder, this skips names that begin with a dot: .ipynb_checkpoints is not a class, and macOS's ._1.jpg not
an image. Source: `find_classes` and `make_dataset` in torchvision/datasets/folder.py.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lockstep.data.sets import FileSplit
from lockstep.errors import DataError

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
    above = {str(top): frozenset({_identity(str(top))})}
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
