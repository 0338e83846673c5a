"""Facts about a data set on disk, and its check on all cores: a pack by its checksums, a folder by decoding images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from lockstep.data.decode import decode_bytes, fault_of, header
from lockstep.data.parallel_map import run_all
from lockstep.data.sets import MAX_IMAGE_BYTES, EncodedSplit, FileSplit
from lockstep.data.sources import pack_reader
from lockstep.data.sources.image_folder import describe_range, list_images
from lockstep.errors import DataError
from lockstep.files.untrusted import read_bytes

SAMPLED = 500


@dataclass(frozen=True)
class SplitFacts:
    """Facts about one split: exact counts, and statistics of the headers of up to `SAMPLED` evenly spaced images."""

    name: str
    samples: int
    size_bytes: int
    shards: int
    class_sizes: tuple[int, int]  # images of the smallest and of the largest class
    looked_at: int
    unreadable: int
    forms: Counter[str]
    short_sides: tuple[int, int, int]  # smallest, median, largest
    long_sides: tuple[int, int, int]


@dataclass(frozen=True)
class SetFacts:
    """Facts about a data set; `manifest` is None for a folder of images."""

    classes: tuple[str, ...]
    manifest: pack_reader.Manifest | None
    splits: tuple[SplitFacts, ...]
    notes: Sequence[str] = ()


def describe(path: Path) -> SetFacts:
    """Gather facts about a folder or a pack.

    Raises:
        DataError: `path` is neither, or is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; pass a folder with train/ and val/, or a pack")
    manifest = pack_reader.Manifest.read(path) if pack_reader.is_packed(path) else None
    parts: Sequence[EncodedSplit]
    if manifest:
        classes, parts = manifest.classes, pack_reader.splits(path, manifest)
    else:
        classes, *parts = list_images(path)
    facts = tuple(
        _describe_split(name, part, len(classes)) for name, part in zip(pack_reader.SPLITS, parts, strict=True)
    )
    return SetFacts(classes, manifest, facts, describe_range(parts[0], manifest.bits if manifest else None))


def _describe_split(name: str, split: EncodedSplit, classes: int) -> SplitFacts:
    counts = np.bincount(np.asarray(split.labels), minlength=classes)
    samples = np.unique(np.linspace(0, len(split) - 1, min(len(split), SAMPLED)).astype(int))
    headers = [found for sample in samples.tolist() if (found := header(split, sample))]
    shards = len(split.shards) if isinstance(split, pack_reader.PackedSplit) else 0
    return SplitFacts(
        name,
        len(split),
        _size_bytes(split),
        shards,
        (int(counts.min()), int(counts.max())),
        len(samples),
        len(samples) - len(headers),
        Counter(each.form for each in headers),
        _spread([min(each.size) for each in headers]),
        _spread([max(each.size) for each in headers]),
    )


def _size_bytes(split: EncodedSplit) -> int:
    if isinstance(split, pack_reader.PackedSplit):
        return int(split.index["length"].sum(dtype=np.int64))
    assert isinstance(split, FileSplit)
    return sum(path.stat().st_size for path in split.paths if path.exists())  # a link may be dangling


def _spread(sides: Sequence[int]) -> tuple[int, int, int]:
    ordered = sorted(sides) or [0]
    return ordered[0], ordered[len(ordered) // 2], ordered[-1]


FILES_A_TASK = 256


@dataclass(frozen=True)
class VerifyShardTask:
    """One shard of the split in `folder`, and its rows of the index; no rows if the index is damaged."""

    folder: Path
    shard: pack_reader.Shard
    rows: npt.NDArray[np.void]

    def __len__(self) -> int:
        return self.shard.samples


Files = tuple[Path, ...]  # of a folder


@dataclass(frozen=True)
class Verification:
    """A verification, split into tasks for the processes."""

    samples: int
    tasks: Sequence[VerifyShardTask | Files]
    bad: list[str]  # faults found before any sample is read


def plan(path: Path) -> Verification:
    """Plan the verification of a pack or a folder.

    Raises:
        DataError: `path` is neither a pack nor a folder of images, or the pack's dataset.json is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; pass a folder with train/ and val/, or a pack")
    if pack_reader.is_packed(path):
        return _plan_pack(path, pack_reader.Manifest.read(path))
    _, train, val = list_images(path)
    paths = [*train.paths, *val.paths]
    pieces = [tuple(paths[start : start + FILES_A_TASK]) for start in range(0, len(paths), FILES_A_TASK)]
    return Verification(len(paths), pieces, [])


def _plan_pack(path: Path, manifest: pack_reader.Manifest) -> Verification:
    tasks: list[VerifyShardTask | Files] = []
    bad, samples = [], 0
    for name in pack_reader.SPLITS:
        folder, part = path / name, manifest.splits[name]
        samples += part.samples
        index, faults = _read_index(folder, part, len(manifest.classes))
        bad += faults
        first = 0
        for shard in part.shards:
            tasks.append(VerifyShardTask(folder, shard, index[first : first + shard.samples]))
            first += shard.samples
    return Verification(samples, tasks, bad)


def _read_index(folder: Path, part: pack_reader.PackedPart, classes: int) -> tuple[npt.NDArray[np.void], list[str]]:
    """Return a split's index, empty if damaged, and its faults."""
    try:
        index = pack_reader.open_index(folder, part.shards)
        pack_reader.check_index(folder, index, part, classes)
    except DataError as error:
        return np.empty(0, pack_reader.ROW), [str(error)]
    return np.array(index), []  # copied: if a mapped file shrinks, reading it kills the process


def run(verification: Verification, processes: int, advance: Callable[[int], None]) -> list[str]:
    """Verify, and return one line per fault.

    Args:
        advance: Called with the number of images done since the last call.

    Raises:
        DataError: A process was killed.
    """
    found = []
    for task, faults in run_all(verify_task, verification.tasks, processes):
        found += faults
        advance(len(task))
    return verification.bad + sorted(found)


def verify_task(task: VerifyShardTask | Files) -> list[str]:
    """Return the faults of one task."""
    return _verify_shard(task) if isinstance(task, VerifyShardTask) else _verify_files(task)


def _verify_shard(task: VerifyShardTask) -> list[str]:
    path, bad, digest, position = task.folder / task.shard.file, [], hashlib.sha256(), 0
    try:
        task.shard.check_size(task.folder)
        with path.open("rb") as file:  # read, not mapped: a failing disk raises OSError instead of SIGBUS
            for _, _, start, offset, length, crc in task.rows.tolist():
                if not position <= start <= offset <= offset + length <= task.shard.size_bytes:
                    raise DataError(f"{path} does not match its index")
                before, content = file.read(offset - position), file.read(length)
                digest.update(before)
                digest.update(content)
                if crc32(content) != crc:
                    bad.append(
                        f"{path}!{pack_reader.member_name(before[start - position :])} has changed since it was packed"
                    )
                position = offset + length
            while piece := file.read(pack_reader.PIECE_BYTES):
                digest.update(piece)
        if not bad and digest.hexdigest() != task.shard.sha256:
            where = ", outside the images" if len(task.rows) else ""
            bad.append(f"{path} has changed since it was packed{where}")
    except DataError as error:
        bad.append(str(error))
    except OSError as error:
        bad.append(f"{path} cannot be read ({error.strerror})")
    return bad


def _verify_files(paths: Files) -> list[str]:
    bad = []
    for path in paths:
        try:
            decode_bytes(read_bytes(path, MAX_IMAGE_BYTES), 3)
        except Exception as error:  # Pillow's decoders raise many types on damaged files
            bad.append(f"{path} {fault_of(error)}")
    return bad
