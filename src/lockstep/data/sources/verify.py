"""Verify a data set on all cores: a pack by its checksums, a folder by decoding each image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from lockstep.data.packed.pack_reader import (
    PIECE_BYTES,
    ROW,
    SPLITS,
    Manifest,
    PackedPart,
    Shard,
    check_index,
    is_packed,
    member_name,
    open_index,
)
from lockstep.data.process_pool import Advance, run_all
from lockstep.data.sets import MOST_IMAGE_BYTES
from lockstep.data.sources.folder_listing import list_images
from lockstep.errors import DataError
from lockstep.files.untrusted import read_bytes

FILES_A_TASK = 256


@dataclass(frozen=True)
class Verification:
    """A verification, split into tasks for the processes."""

    samples: int
    tasks: Sequence[VerifyShardTask | FilesTask]
    bad: list[str]  # faults found before any sample is read


@dataclass(frozen=True)
class VerifyShardTask:
    """One shard of the split in `folder`, and its rows of the index; no rows if the index is damaged."""

    folder: Path
    shard: Shard
    rows: npt.NDArray[np.void]


@dataclass(frozen=True)
class FilesTask:
    """Some files of a folder."""

    paths: tuple[Path, ...]


def plan(path: Path) -> Verification:
    """Plan the verification of a pack or a folder.

    Raises:
        DataError: `path` is neither a pack nor a folder of images, or the pack's dataset.json is damaged.
    """
    if not path.is_dir():
        raise DataError(f"{path} is not a folder; pass a folder with train/ and val/, or a pack")
    if is_packed(path):
        return _plan_pack(path, Manifest.read(path))
    _, train, val = list_images(path)
    paths = [*train.paths, *val.paths]
    pieces = [tuple(paths[start : start + FILES_A_TASK]) for start in range(0, len(paths), FILES_A_TASK)]
    return Verification(len(paths), [FilesTask(piece) for piece in pieces], [])


def _plan_pack(path: Path, manifest: Manifest) -> Verification:
    tasks: list[VerifyShardTask | FilesTask] = []
    bad, samples = [], 0
    for name in SPLITS:
        folder, part = path / name, manifest.splits[name]
        samples += part.samples
        index, faults = _read_index(folder, part, len(manifest.classes))
        bad += faults
        first = 0
        for shard in part.shards:
            tasks.append(VerifyShardTask(folder, shard, index[first : first + shard.samples]))
            first += shard.samples
    return Verification(samples, tasks, bad)


def _read_index(folder: Path, part: PackedPart, classes: int) -> tuple[npt.NDArray[np.void], list[str]]:
    """Return a split's index, empty if damaged, and its faults."""
    try:
        index = open_index(folder, part.shards)
        check_index(folder, index, part, classes)
    except DataError as error:
        return np.empty(0, ROW), [str(error)]
    return np.array(index), []  # copied: if a mapped file shrinks, reading it kills the process


def run(verification: Verification, processes: int, advance: Advance) -> list[str]:
    """Verify, and return one line per fault.

    Raises:
        DataError: A process was killed.
    """
    found = run_all(verify_task, verification.tasks, processes, advance)
    return verification.bad + sorted(line for lines in found for line in lines)


def verify_task(task: VerifyShardTask | FilesTask, advance: Advance) -> list[str]:
    """Return the faults of one task."""
    return _verify_shard(task, advance) if isinstance(task, VerifyShardTask) else _verify_files(task, advance)


def _verify_shard(task: VerifyShardTask, advance: Advance) -> list[str]:
    path, done = task.folder / task.shard.file, 0
    bad, digest, position = [], hashlib.sha256(), 0
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
                    bad.append(f"{path}!{member_name(before[start - position :])} has changed since it was packed")
                position = offset + length
                done += 1
                advance(1)
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        if not bad and digest.hexdigest() != task.shard.sha256:
            where = ", outside the images" if len(task.rows) else ""
            bad.append(f"{path} has changed since it was packed{where}")
    except DataError as error:
        bad.append(str(error))
    except OSError as error:
        bad.append(f"{path} cannot be read ({error.strerror})")
    advance(task.shard.samples - done)
    return bad


def _verify_files(task: FilesTask, advance: Advance) -> list[str]:
    from lockstep.data.pipeline.decode import decode_bytes
    from lockstep.data.pipeline.image_header import fault_of

    bad = []
    for path in task.paths:
        try:
            decode_bytes(read_bytes(path, MOST_IMAGE_BYTES), 3)
        except Exception as error:  # Pillow's decoders raise many types on damaged files
            bad.append(f"{path} {fault_of(error)}")
        advance(1)
    return bad
