"""Make ImageNet's folder tree from its official archives (ILSVRC2012). Resumable; inner archives are read in place.

    ILSVRC2012_img_train.tar          n01440764.tar, ... : one tar per class, of n01440764_10026.JPEG, ...
    ILSVRC2012_img_val.tar            ILSVRC2012_val_00000001.JPEG, ...
    ILSVRC2012_devkit_t12.tar.gz      the class numbers of the validation images

Only members whose names match these patterns are written, so nothing is written outside the target folder. Source of
the layout: torchvision/datasets/imagenet.py. imagenet_classes.txt lists the classes by number, from 1
(ILSVRC2012_ID), as in the devkit's meta.mat.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from lockstep.errors import DataError, first_line
from lockstep.files.atomic import PARTIAL, partial_of
from lockstep.files.folder_lock import holding

ORDER = "lockstep data prepare imagenet TRAIN.tar VAL.tar DEVKIT.tar.gz DEST"
CLASS_TAR = re.compile(r"(n\d{8})\.tar", re.ASCII)
TRAIN_IMAGE = re.compile(r"n\d{8}_\d+\.JPEG", re.ASCII)
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.ASCII)
DEVKIT = re.compile(r"ILSVRC2012_devkit_t12(/.*)?", re.DOTALL)
COPY_BYTES = 1 << 20
MAX_DEVKIT_BYTES = 64 << 20  # more than 10 times the official one


@dataclass(frozen=True)
class Archives:
    """The three archives, checked, and what to extract.

    Args:
        val_classes: The class of each validation image, in their order.
        train_tars: The offset of each class's tar in the training archive, and its bytes.
    """

    train: Path
    val: Path
    val_classes: tuple[str, ...]
    classes: tuple[str, ...]
    train_tars: dict[str, tuple[int, int]]


def look(train: Path, val: Path, devkit: Path, names: Sequence[str] = ()) -> Archives:
    """Read and check the archives' tables of contents.

    Raises:
        DataError: An archive is missing, in the wrong position, truncated or damaged.
    """
    for path, kind in ((train, "training"), (val, "validation"), (devkit, "devkit")):
        _check_kind(path, kind)
    names, truth = names or numbered_classes(), _read_truth(devkit)
    unknown = sorted(set(truth) - set(range(1, len(names) + 1)))
    if unknown:
        raise DataError(
            f"{devkit} labels validation images with class {unknown[0]}, but there are {len(names):,} classes"
        )
    val_classes = tuple(names[number - 1] for number in truth)
    classes = tuple(sorted(names))
    tars = {}
    with _damage_named(train, "its table of contents"), tarfile.open(train, "r:") as archive:
        for member in _files(archive, train, _size(train)):
            name = _matching(CLASS_TAR, member, train)[1]
            tars[name] = member.offset_data, member.size
    wrong = sorted(set(tars) ^ set(classes))
    if wrong:
        what = "has unknown" if wrong[0] in tars else "lacks"
        raise DataError(
            f"{train} {what} class {wrong[0]}; it has {len(tars):,} classes, ImageNet has {len(classes):,}; "
            f"download it again if it is truncated"
        )
    return Archives(train, val, val_classes, classes, tars)


def prepare(archives: Archives, folder: Path, advance: Callable[[int], None]) -> tuple[int, int]:
    """Write DEST/train and DEST/val. Complete folders are kept if their files match by name and size.

    Args:
        advance: Called with the number of archive bytes done since the last call.

    Returns:
        The numbers of training and validation images.

    Raises:
        DataError: An archive is damaged, or DEST contains other files or cannot be written.
    """
    with ExitStack() as stack:
        with _writing(folder):
            _check_target(folder, archives.classes)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(holding(folder, "lockstep data prepare"))
        count, left = 0, _size(archives.train)
        for name in sorted(archives.train_tars, key=lambda name: archives.train_tars[name]):  # in disk order
            start, size = archives.train_tars[name]
            count += _extract_class(archives.train, start, size, folder / "train" / name)
            advance(size)
            left -= size
        advance(left)  # the tar headers
        return count, _extract_validation(archives, folder / "val", advance)


def _extract_class(archive: Path, start: int, size: int, target: Path) -> int:
    """Extract one class's images, from a tar inside `archive`; return their number."""
    end = start + size
    with _damage_named(archive, target.name), archive.open("rb") as file:
        file.seek(start)
        with tarfile.open(fileobj=file, mode="r:") as inner:
            members = {_matching(TRAIN_IMAGE, member, archive)[0]: member for member in _files(inner, archive, end)}
            if not members:
                raise DataError(f"{archive} has no images of class {target.name}; download it again")
            for _ in _fill(target, inner, members):
                pass
    return len(members)


def _extract_validation(archives: Archives, target: Path, advance: Callable[[int], None]) -> int:
    path, left = archives.val, _size(archives.val)
    with _damage_named(path, "the validation images"), tarfile.open(path, "r:") as archive:
        images = {}
        for member in _files(archive, path, left):
            match = _matching(VAL_IMAGE, member, path)
            images[int(match[1])] = match[0], member
        if sorted(images) != list(range(1, len(archives.val_classes) + 1)):
            raise DataError(
                f"{path} has {len(images):,} images, but the devkit labels {len(archives.val_classes):,}; download it "
                f"again"
            )
        members = {f"{archives.val_classes[number - 1]}/{name}": member for number, (name, member) in images.items()}
        for size in _fill(target, archive, members):
            advance(size)
            left -= size
    advance(left)
    return len(members)


def _fill(target: Path, archive: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> Iterator[int]:
    """Extract the files of a folder under a temporary name, and rename it when complete; keep a complete folder.

    Yields the size in bytes of each extracted file.
    """
    partial = partial_of(target)
    with _writing(target):
        if target.is_dir():
            _check_complete(target, {name: member.size for name, member in members.items()})
            return
        shutil.rmtree(partial, ignore_errors=True)  # an interrupted command left it
        for folder in {(partial / name).parent for name in members}:
            folder.mkdir(parents=True, exist_ok=True)
    for name, member in members.items():
        source = archive.extractfile(member)
        assert source is not None
        content = source.read()
        if len(content) != member.size:
            raise tarfile.ReadError("unexpected end of data")
        with _writing(partial / name):
            (partial / name).write_bytes(content)
        yield member.size
    with _writing(target):
        os.rename(partial, target)


def _check_complete(folder: Path, sizes: dict[str, int]) -> None:
    """Raise DataError unless a folder has exactly the files with these sizes, by relative path."""
    found = {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}
    if different := sorted(name for name, _ in found.items() ^ sizes.items()):
        raise DataError(
            f"{folder} differs from the archive in {different[0]}; remove it and run the same command again, or choose "
            f"another DEST"
        )


def _check_target(folder: Path, classes: tuple[str, ...]) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a new folder, or one that this command started")
    for part in (folder / "train", folder / "val", partial_of(folder / "val")):
        found = {path.name.removeprefix(PARTIAL) for path in part.iterdir()} if part.is_dir() else set()
        others = sorted(found - set(classes))
        if others:
            raise DataError(
                f"{part} contains {others[0]}, which is not in the archives; remove it, or choose another DEST"
            )


def _check_kind(path: Path, kind: str) -> None:
    """Raise DataError unless `path` is the archive of this kind."""
    if not path.is_file():
        raise DataError(f"{kind} archive {path} not found; download it from image-net.org and run: {ORDER}")
    try:
        with tarfile.open(path, "r:gz" if _is_gzip(path) else "r:") as archive:
            member = archive.next()
    except Exception as error:  # tarfile passes on errors of gzip and zlib
        raise DataError(
            f"{kind} archive {path} is damaged or not a tar file ({first_line(error)}); download it again"
        ) from None
    name = member.name if member else ""
    forms = {"training": CLASS_TAR, "validation": VAL_IMAGE, "devkit": DEVKIT}
    found = next((known for known, form in forms.items() if form.fullmatch(name.removeprefix("./"))), None)
    if found != kind:
        what = f"the {found} archive" if found else f"an unknown archive (first member: {name!r})"
        raise DataError(f"{path}: expected the {kind} archive, found {what}; usage: {ORDER}")


@cache
def numbered_classes() -> tuple[str, ...]:
    """Return the WordNet ids of ImageNet's classes 1, 2, ..."""
    return tuple(files(__package__).joinpath("imagenet_classes.txt").read_text(encoding="ascii").split())


def _read_truth(path: Path) -> list[int]:
    """Return the class numbers of the validation images."""
    try:
        with tarfile.open(fileobj=BytesIO(_unpacked(path)), mode="r:") as archive:
            truth = _content(archive, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt")
        return [int(line) for line in truth.split()]
    except Exception as error:  # tarfile and gzip raise many types on damaged files
        raise DataError(f"{path} is damaged or not the devkit ({first_line(error)}); download it again") from None


def _unpacked(path: Path) -> bytes:
    """Return the devkit's tar; the file may be uncompressed."""
    with gzip.open(path) if _is_gzip(path) else path.open("rb") as content:
        tar = content.read(MAX_DEVKIT_BYTES + 1)
    if len(tar) > MAX_DEVKIT_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_DEVKIT_BYTES:,} bytes")
    return tar


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()


def _files(archive: tarfile.TarFile, path: Path, end: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar that ends at byte `end` of `path`: only regular files with unique names."""
    seen = set()
    for member in archive:
        if not member.isreg() or member.issparse() or member.name in seen:
            raise DataError(
                f"{path} contains {member.name!r} as a link, a folder or a duplicate, unlike ImageNet; download it "
                f"again"
            )
        if member.offset_data + member.size > path.stat().st_size:
            raise tarfile.ReadError(f"it is truncated in {member.name}")
        seen.add(member.name)
        yield member
    _check_end(path, archive.offset, end)


def _check_end(path: Path, start: int, end: int) -> None:
    """Check that only zeros follow: tarfile silently treats a damaged header as the end."""
    if start >= end:
        raise tarfile.ReadError("its end marker is missing")
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            piece = file.read(min(COPY_BYTES, end - start))
            if not piece or piece.strip(b"\0"):
                raise tarfile.ReadError(f"expected a tar header at byte {start:,}")
            start += len(piece)


def _size(path: Path) -> int:
    with _damage_named(path, "its end"):
        return path.stat().st_size


def _matching(form: re.Pattern[str], member: tarfile.TarInfo, path: Path) -> re.Match[str]:
    match = form.fullmatch(member.name.removeprefix("./"))
    if match is None:
        raise DataError(f"{path} contains {member.name!r}, which is not in ImageNet; download it again")
    return match


@contextmanager
def _damage_named(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}); fix this and run the same command again") from None
    except Exception as error:  # tarfile raises many types on damaged headers
        raise DataError(
            f"{path} is truncated or damaged at {what} ({first_line(error)}); download it again and run the same "
            f"command to resume"
        ) from None


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}); fix this and run the same command again") from None
