"""ImageNet's folder tree from its official archives (ILSVRC2012), resumable, without unpacking inner archives to disk.

    ILSVRC2012_img_train.tar          n01440764.tar, ... : one tar a class, of n01440764_10026.JPEG, ...
    ILSVRC2012_img_val.tar            ILSVRC2012_val_00000001.JPEG, ...
    ILSVRC2012_devkit_t12.tar.gz      the numbers of the validation images' classes

Names in archives are held against these forms: nothing else is written, and so nothing outside the target folder.
Facts and MD5 sums: torchvision/datasets/imagenet.py. imagenet_classes.txt lists the classes in the order of their
numbers, from 1 (ILSVRC2012_ID), as the devkit's meta.mat has them in MATLAB's form.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path

from lockstep.errors import DataError, first_line
from lockstep.files.atomic import PARTIAL, partial_of, replacing
from lockstep.files.folder_lock import holding

OFFICIAL_MD5 = {
    "training": "1d675b47d978889d74fa0da5fadfb00e",
    "validation": "29b22e2961454d5413ddabcf34fc5622",
    "devkit": "fa75699e90414af021442c21a62c3abf",
}
ORDER = "lockstep data prepare imagenet TRAIN.tar VAL.tar DEVKIT.tar.gz DEST"
CLASS_TAR = re.compile(r"(n\d{8})\.tar", re.ASCII)
TRAIN_IMAGE = re.compile(r"n\d{8}_\d+\.JPEG", re.ASCII)
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG", re.ASCII)
DEVKIT = re.compile(r"ILSVRC2012_devkit_t12(/.*)?", re.DOTALL)
COPY_BYTES = 1 << 20
MOST_DEVKIT_BYTES = 64 << 20  # the official one unpacks to less than a tenth of that


@dataclass(frozen=True)
class Archives:
    """The three archives, each of which is what it should be, and what there is to do."""

    train: Path
    val: Path
    val_classes: tuple[str, ...]  # of validation image 1, 2, ...
    classes: tuple[str, ...]
    train_tars: dict[str, tuple[int, int]]  # class: where its tar lies in TRAIN.tar, and its bytes


def look(train: Path, val: Path, devkit: Path) -> Archives:
    """Look at the archives' tables of contents.

    Raises:
        DataError: One is missing, another's, cut off or damaged.
    """
    for path, kind in ((train, "training"), (val, "validation"), (devkit, "devkit")):
        _check_kind(path, kind)
    names, truth = numbered_classes(), _read_truth(devkit)
    unknown = sorted(set(truth) - set(range(1, len(names) + 1)))
    if unknown:
        raise DataError(
            f"{devkit} labels validation images with class {unknown[0]}, but there are {len(names):,} classes"
        )
    val_classes = tuple(names[number - 1] for number in truth)
    classes = tuple(sorted(names))
    tars = {}
    for member in _members(train):
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


def md5(path: Path, kind: str) -> tuple[str, bool]:
    """An archive's MD5 sum, and whether it is the official one's."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    return digest.hexdigest(), digest.hexdigest() == OFFICIAL_MD5[kind]


def prepare(archives: Archives, folder: Path, advance: Callable[[int], None]) -> tuple[int, int]:
    """Write DEST/train and DEST/val; what is there already is compared by names and sizes, and kept.

    Args:
        advance: Called with bytes of the archives as they are done.

    Returns:
        How many training and validation images there are.

    Raises:
        DataError: An archive is damaged, DEST holds other things, or it cannot be written.
    """
    with ExitStack() as stack:
        with _writing(folder):
            _check_target(folder, archives.classes)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(holding(folder, "lockstep data prepare"))
        count, left = 0, _size(archives.train)
        for name in sorted(archives.train_tars, key=lambda name: archives.train_tars[name]):  # as they lie on disk
            start, size = archives.train_tars[name]
            count += _extract_class(archives.train, start, size, folder / "train" / name)
            advance(size)
            left -= size
        advance(left)  # its headers
        return count, _extract_validation(archives, folder / "val", advance)


def _extract_class(archive: Path, start: int, size: int, target: Path) -> int:
    """Write one class's images under another name, and give the folder its name when all are there."""
    end = start + size
    with _damage_named(archive, target.name), _inner_tar(archive, start) as inner:
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
    """Write what is missing of a folder's files under another name, and give it its own when all are there.

    Yields the bytes of each file, as it is done. A whole folder keeps its name all along.
    """
    partial = partial_of(target)
    with _writing(target):
        if target.is_dir() and partial.is_dir():
            raise DataError(f"{target} and {partial} both exist; remove {partial} and run the same command again")
        found = _sizes(target if target.is_dir() else partial)
        others = sorted({_finished(name) for name in found} - members.keys())
        if others:
            raise DataError(
                f"{target} contains {others[0]}, which is not in the archives; remove it, or choose another DEST"
            )
        missing = [name for name, member in members.items() if found.get(name) != member.size]
        if target.is_dir() and not missing:
            return
        if target.is_dir():
            os.rename(target, partial)
        for folder in {(partial / name).parent for name in members}:
            folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        _extract(archive, members[name], partial / name)
        yield members[name].size
    with _writing(target):
        os.rename(partial, target)


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of all that lies in a folder and below, by names in it."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def _finished(name: str) -> str:
    """A file's name in a folder, as it will be when the file is whole."""
    return str(Path(name).with_name(Path(name).name.removeprefix(PARTIAL)))


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Write one file, whole or not at all."""
    source = archive.extractfile(member)
    assert source is not None
    content = source.read()
    if len(content) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    with _writing(target), replacing(target) as partial:
        partial.write_bytes(content)


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
    """Refuse an archive that is another of the three, or none."""
    if not path.is_file():
        raise DataError(f"{kind} archive {path} not found; download it from image-net.org and run: {ORDER}")
    try:
        with tarfile.open(path, "r:gz" if _is_gzip(path) else "r:") as archive:
            member = archive.next()
    except Exception as error:  # tarfile passes on what gzip and zlib raise
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
    """The WordNet numbers of ImageNet's classes 1, 2, ..."""
    return tuple(files(__package__).joinpath("imagenet_classes.txt").read_text(encoding="ascii").split())


def _read_truth(path: Path) -> list[int]:
    """The numbers of the validation images' classes."""
    try:
        with tarfile.open(fileobj=BytesIO(_unpacked(path)), mode="r:") as archive:
            truth = _content(archive, "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt")
        return [int(line) for line in truth.split()]
    except Exception as error:  # on damaged files tarfile and gzip raise many types
        raise DataError(f"{path} is damaged or not the devkit ({first_line(error)}); download it again") from None


def _unpacked(path: Path) -> bytes:
    """The tar within the devkit, which need not be compressed."""
    with gzip.open(path) if _is_gzip(path) else path.open("rb") as content:
        tar = content.read(MOST_DEVKIT_BYTES + 1)
    if len(tar) > MOST_DEVKIT_BYTES:
        raise ValueError(f"it unpacks to more than {MOST_DEVKIT_BYTES:,} bytes")
    return tar


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()


def _members(path: Path) -> list[tarfile.TarInfo]:
    with _damage_named(path, "its table of contents"), tarfile.open(path, "r:") as archive:
        return list(_files(archive, path, _size(path)))


def _files(archive: tarfile.TarFile, path: Path, end: int) -> Iterator[tarfile.TarInfo]:
    """The members of a tar that ends at byte `end` of `path`, each a plain file with a name of its own.

    Raises:
        tarfile.ReadError: There is more after the last of them than the zeros that end a tar.
    """
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
    """tarfile takes a damaged header for the end, and says nothing of what comes after it."""
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
def _inner_tar(archive: Path, start: int) -> Iterator[tarfile.TarFile]:
    """A tar that lies inside another, read in place."""
    with archive.open("rb") as file:
        file.seek(start)
        with tarfile.open(fileobj=file, mode="r:") as inner:
            yield inner


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
