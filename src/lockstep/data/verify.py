"""Verifying a data set: a pack by its checksums, a folder by decoding each image; by all cores."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from lockstep.data.listing import list_images
from lockstep.data.packed import INDEX_FILE, SPLITS, Manifest, PackedPart, PackedSplit, Shard, is_packed
from lockstep.data.processes import Advance, run_all
from lockstep.errors import CorruptImageError, DataError, first_line

FILES_A_TASK = 256


@dataclass(frozen=True)
class Verification:
    """What to look at, in pieces that processes take one by one."""

    samples: int
    tasks: Sequence[ShardTask | FilesTask]
    bad: list[str]  # what is known to be wrong before a sample is read


@dataclass(frozen=True)
class ShardTask:
    """One shard of the split in `folder`, whose samples are the index's rows `first` and following."""

    folder: Path
    shards: tuple[Shard, ...]
    number: int
    first: int


@dataclass(frozen=True)
class FilesTask:
    """Some files of a folder."""

    paths: tuple[Path, ...]


def plan(path: Path) -> Verification:
    """What there is to verify.

    Raises:
        DataError: `path` is neither a pack nor a folder of images, or the pack's dataset.json is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; name a folder with train/ and val/, or a pack")
    if is_packed(path):
        return _plan_pack(path, Manifest.read(path))
    _, train, val = list_images(path)
    paths = [*train.paths, *val.paths]
    pieces = [tuple(paths[start : start + FILES_A_TASK]) for start in range(0, len(paths), FILES_A_TASK)]
    return Verification(len(paths), [FilesTask(piece) for piece in pieces], [])


def _plan_pack(path: Path, manifest: Manifest) -> Verification:
    tasks: list[ShardTask | FilesTask] = []
    bad, samples = [], 0
    for name in SPLITS:
        folder, part = path / name, manifest.splits[name]
        samples += part.samples
        bad += _index_faults(folder, part)
        first = 0
        for number, shard in enumerate(part.shards):
            tasks.append(ShardTask(folder, part.shards, number, first))
            first += shard.samples
    return Verification(samples, tasks, bad)


def _index_faults(folder: Path, part: PackedPart) -> list[str]:
    path = folder / INDEX_FILE
    try:
        same = hashlib.sha256(path.read_bytes()).hexdigest() == part.index_sha256
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})"]
    return [] if same else [f"{path} is not the index that was packed"]


def run(verification: Verification, processes: int, advance: Advance) -> list[str]:
    """Verify, and return what is damaged, a line each.

    Raises:
        DataError: A process was killed.
    """
    found = run_all(verify_task, verification.tasks, processes, advance)
    return verification.bad + sorted(line for lines in found for line in lines)


def verify_task(task: ShardTask | FilesTask, advance: Advance) -> list[str]:
    """What is damaged in one piece."""
    return _verify_shard(task, advance) if isinstance(task, ShardTask) else _verify_files(task, advance)


def _verify_shard(task: ShardTask, advance: Advance) -> list[str]:
    shard = task.shards[task.number]
    path = task.folder / shard.file
    try:
        shard.check_size(task.folder)
        rows = np.load(task.folder / INDEX_FILE, mmap_mode="r", allow_pickle=False)
        rows = rows[task.first : task.first + shard.samples].tolist()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            content.madvise(mmap.MADV_SEQUENTIAL)
            bad = []
            for row, (_, _, _, offset, length, crc) in enumerate(rows):
                if crc32(content[offset : offset + length]) != crc:
                    bad.append(row)
                advance(1)
            whole = hashlib.sha256(content).hexdigest() == shard.sha256
    except (OSError, ValueError, EOFError, DataError) as error:
        advance(shard.samples)
        return [str(error) if isinstance(error, DataError) else f"{path} cannot be read ({first_line(error)})"]
    if bad:
        split = PackedSplit(task.folder, task.shards)
        return [f"{split.name(task.first + row)} differs from what was packed" for row in bad]
    return [] if whole else [f"{path} differs from what was packed, outside the images"]


def _verify_files(task: FilesTask, advance: Advance) -> list[str]:
    from lockstep.data.decode import decode

    bad = []
    for path in task.paths:
        try:
            decode(path, 3)
        except CorruptImageError as error:
            bad.append(str(error).partition("; mend")[0])
        advance(1)
    return bad
