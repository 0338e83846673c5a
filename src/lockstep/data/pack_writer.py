"""Pack a folder of images: plan the shards, re-encode images if wanted, and write the shards on all cores.

Without torch, so that processes start fast.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BufferedWriter, BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
from PIL import Image

from lockstep.config.schema import MAX_BITS
from lockstep.data.decode import GRAY_MODES, check_scans, eight_bits, fault_of, open_encoded
from lockstep.data.parallel_map import run_all
from lockstep.data.sets import MAX_IMAGE_BYTES, FileSplit
from lockstep.data.sources import pack_reader
from lockstep.data.sources.image_folder import describe_range, list_images, name_of, validation_folder
from lockstep.errors import ConfigError, CorruptImageError, DataError, first_line, require
from lockstep.files.atomic import partial_of, sync
from lockstep.files.folder_lock import holding
from lockstep.files.untrusted import read_bytes

# Pillow's format names, and their extensions for WebDataset's readers.
EXTENSIONS = {"jpeg": "jpg", "png": "png", "webp": "webp"}
QUALITY = 90


@dataclass(frozen=True)
class Encoding:
    """The re-encoding of images. By default, files are stored unchanged.

    Images whose short side exceeds `short_side` are resized to it, and become JPEG. `bits` is as of `InputSpec`, and
    stored for training.
    """

    short_side: int | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        require(self.short_side is None or self.short_side >= 1, "--short-side", self.short_side, "at least 1")
        require(self.bits is None or 1 <= self.bits <= MAX_BITS, "--bits", self.bits, f"between 1 and {MAX_BITS}")

    def apply(self, content: bytes, path: Path) -> tuple[bytes, str]:
        """Return the bytes to store for the image file `path`, and their extension.

        As in training, EXIF rotation is not applied. Transparency is dropped; gray images stay gray.

        Raises:
            CorruptImageError: The image cannot be decoded for re-encoding.
            DataError: The image cannot be stored as JPEG.
        """
        if self.short_side is None:
            return content, _extension(path)
        try:
            check_scans(content)
            with open_encoded(content) as image:
                short, form = min(image.size), (image.format or "").lower()
                if short <= self.short_side:
                    return content, EXTENSIONS.get(form) or _extension(path)
                width, height = (max(1, round(side * self.short_side / short)) for side in image.size)
                pixels = _decode(image, (width, height), self.bits)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise many types on damaged files
            raise CorruptImageError(
                f"{path} {fault_of(error)}; fix or remove it; `lockstep data pack --skip-corrupt` skips such files"
            ) from None
        stored = BytesIO()
        try:
            pixels.save(stored, "jpeg", quality=QUALITY)  # Pillow's chroma subsampling is 4:2:0
        except MemoryError:
            raise
        except Exception as error:  # such as more pixels than the format supports
            raise DataError(
                f"{path} cannot be stored as JPEG ({first_line(error)}); remove it, or set a smaller --short-side"
            ) from None
        return stored.getvalue(), "jpg"


def _decode(image: Image.Image, size: tuple[int, int], bits: int | None) -> Image.Image:
    """Decode to gray or RGB, as in training, resized to `size`."""
    image.draft(None, (2 * size[0], 2 * size[1]))  # JPEG: decode at 1/2, 1/4 or 1/8, never below twice the size
    pixels = eight_bits(image, bits)
    pixels = pixels.convert("L" if pixels.mode in GRAY_MODES else "RGB")
    return pixels if pixels.size == size else pixels.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _extension(path: Path) -> str:
    extension = path.suffix[1:].lower()
    return "jpg" if extension == "jpeg" else extension


LEFT_OUT = (errno.ENOENT, errno.EACCES, errno.ELOOP)  # the file's faults; other errors are temporary or the machine's


class Item(NamedTuple):
    """One image to pack: its file, the name of its members without extension, and its class number."""

    path: str
    key: str
    label: int


@dataclass(frozen=True)
class ShardTask:
    """One shard to write, the task of one process; `number` is its position in the split."""

    path: Path
    number: int
    items: tuple[Item, ...]
    encoding: Encoding
    skip_corrupt: bool


class WrittenShard(NamedTuple):
    """A written shard, its rows in the split's index, and the files that it leaves out."""

    shard: pack_reader.Shard
    rows: npt.NDArray[np.void]
    left_out: list[str]


@dataclass(frozen=True)
class PackPlan:
    """A plan to pack a folder; depends only on the folder and the settings, not on the machine."""

    out: Path
    name: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    tasks: dict[str, list[ShardTask]]
    notes: Sequence[str] = ()

    @property
    def all_tasks(self) -> list[ShardTask]:
        return [task for name in pack_reader.SPLITS for task in self.tasks[name]]

    @property
    def samples(self) -> int:
        return sum(len(task.items) for task in self.all_tasks)


def make_plan(
    folder: Path, out: Path, encoding: Encoding, shard_bytes: int = 128 << 20, skip_corrupt: bool = False
) -> PackPlan:
    """Plan the shards of a folder. Writes nothing.

    Args:
        shard_bytes: A shard ends when its source files reach this total size.

    Raises:
        DataError: The folder does not have the layout that `lockstep train` reads.
        ConfigError: The pack cannot be written to `out`.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; pass one with train/ and val/ (or test/)")
    if pack_reader.is_packed(folder):
        raise DataError(f"{folder} is already packed; pass the original folder of images")
    source, target = folder.resolve(), out.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise ConfigError(f"OUT {out} and FOLDER {folder} must not contain each other; choose another OUT")
    _check_target(out)
    classes, *file_splits = list_images(folder)
    roots, partial = (folder / "train", validation_folder(folder)), partial_of(out)
    tasks: dict[str, list[ShardTask]] = {}
    for name, root, split in zip(pack_reader.SPLITS, roots, file_splits, strict=True):
        items = [
            Item(str(path), key, label)
            for path, key, label in zip(split.paths, _keys(split, root), split.labels, strict=True)
        ]
        cuts = _cut([_size_of(path) for path in split.paths], shard_bytes)
        tasks[name] = [
            ShardTask(
                partial / name / f"{name}-{number:06d}.tar", number, tuple(items[start:end]), encoding, skip_corrupt
            )
            for number, (start, end) in enumerate(cuts)
        ]
    settings = {**asdict(encoding), "shard_bytes": shard_bytes}
    return PackPlan(out, name_of(folder), classes, settings, tasks, describe_range(file_splits[0], encoding.bits))


def _check_target(out: Path) -> None:
    """Raise ConfigError unless `out` is new or empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT {out} already exists; choose a new folder, or remove it")


def _size_of(path: Path) -> int:
    """Return a file's size; 0 for a dangling link, which fails when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _keys(split: FileSplit, root: Path) -> Iterator[str]:
    """Yield a unique member name without extension, CLASS/..., for each file.

    WebDataset ends a key at the first dot of its base name, so dots become %2E, and % becomes %25. A key includes the
    file's extension if the name without it is not unique.
    """
    names = [str(path) for path in split.paths]
    stems = [os.path.splitext(name)[0] for name in names]
    counts = Counter(stems)
    counts.update(names)
    begin = len(str(root)) + 1
    for name, stem in zip(names, stems, strict=True):
        folder, base = os.path.split(name if counts[stem] > 1 else stem)
        yield f"{folder[begin:]}/{base.replace('%', '%25').replace('.', '%2E')}"


def _cut(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Split a list of sizes into runs (start, end), each of which ends when its total reaches the limit."""
    start = total = 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= limit or end == len(sizes):
            yield start, end
            start, total = end, 0


def write(plan: PackPlan, processes: int, advance: Callable[[int], None]) -> pack_reader.Manifest:
    """Write the pack under a temporary name, rename it, and return its manifest.

    Args:
        advance: Called with the number of images done since the last call.

    Raises:
        DataError: A file cannot be written or read, or a process was killed.
        CorruptImageError: An image cannot be decoded for re-encoding.
        ConfigError: OUT exists, or another process writes it.
    """
    partial = partial_of(plan.out)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with holding(partial, "lockstep data pack"):
            _check_target(plan.out)
            try:
                manifest = _write_all(plan, partial, processes, advance)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        os.rename(partial, plan.out)
    except OSError as error:
        raise DataError(f"{plan.out} cannot be written ({error}); fix this and run the same command again") from None
    return manifest


def _write_all(plan: PackPlan, folder: Path, processes: int, advance: Callable[[int], None]) -> pack_reader.Manifest:
    for name in pack_reader.SPLITS:
        shutil.rmtree(folder / name, ignore_errors=True)  # a killed process left it
        (folder / name).mkdir()
    written = {}
    for task, result in run_all(write_shard, plan.all_tasks, processes):
        written[task.path] = result
        advance(len(task.items))
    parts = {
        name: _write_index(folder / name, [written[task.path] for task in plan.tasks[name]])
        for name in pack_reader.SPLITS
    }
    manifest = pack_reader.Manifest(plan.name, plan.classes, plan.settings, parts)
    manifest.write(folder)
    return manifest


def _write_index(folder: Path, written: Sequence[WrittenShard]) -> pack_reader.PackedPart:
    """Write the split's index from the rows of its shards."""
    rows = np.concatenate([part.rows for part in written])
    left_out = tuple(path for part in written for path in part.left_out)
    if not len(rows):
        raise DataError(f"none of the images for {folder} can be decoded, for example {left_out[0]}")
    with (folder / pack_reader.INDEX_FILE).open("wb") as file:
        np.save(file, rows)
    sync(folder / pack_reader.INDEX_FILE)
    digest = hashlib.sha256((folder / pack_reader.INDEX_FILE).read_bytes()).hexdigest()
    return pack_reader.PackedPart(len(rows), digest, tuple(part.shard for part in written), left_out)


def write_shard(task: ShardTask) -> WrittenShard:
    """Write a shard, and sync it.

    Raises:
        DataError: The shard cannot be written, as on a full disk, or an image temporarily cannot be read.
        CorruptImageError: An image is missing, or cannot be decoded for re-encoding.
    """
    try:
        with task.path.open("wb") as file:
            written = _write_items(file, task)
        sync(task.path)
        return written
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "free some space" if full else "fix this"
        raise DataError(
            f"{task.path} cannot be written ({error.strerror}); {fix} and run the same command again"
        ) from None
    except MemoryError:
        raise DataError(f"out of memory at {task.path}; lower -j and run the same command again") from None


def _write_items(file: BufferedWriter, task: ShardTask) -> WrittenShard:
    rows, left_out = [], []
    hashed = _HashedFile(file)
    tar = tarfile.TarFile(mode="w", fileobj=cast(IO[bytes], hashed), format=tarfile.PAX_FORMAT, encoding="utf-8")
    with tar:
        for item in task.items:
            try:
                content, extension = task.encoding.apply(_read(item.path), Path(item.path))
            except CorruptImageError:
                if not task.skip_corrupt:
                    raise
                left_out.append(item.path)
            else:
                start = tar.offset
                _add(tar, f"{item.key}.{extension}", content)
                offset = tar.offset - (len(content) + -len(content) % pack_reader.BLOCK)  # without the padding
                _add(tar, f"{item.key}.cls", b"%d" % item.label)
                rows.append((task.number, item.label, start, offset, len(content), crc32(content)))
    shard = pack_reader.Shard(task.path.name, len(rows), file.tell(), hashed.digest.hexdigest())
    return WrittenShard(shard, np.array(rows, pack_reader.ROW), left_out)


class _HashedFile:
    """Passes on what is written to a file, with its SHA-256."""

    def __init__(self, file: BufferedWriter):
        self._file, self.digest = file, hashlib.sha256()
        self.tell = file.tell

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._file.write(content)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append a file without times or owners, so that the tar file is reproducible."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, BytesIO(content))


def _read(path: str) -> bytes:
    try:
        return read_bytes(Path(path), MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, OSError) and error.errno not in LEFT_OUT:
            raise DataError(f"{path} cannot be read ({reason}); fix this and run the same command again") from None
        raise CorruptImageError(
            f"{path} cannot be read ({reason}); fix or remove it; `lockstep data pack --skip-corrupt` skips such files"
        ) from None
