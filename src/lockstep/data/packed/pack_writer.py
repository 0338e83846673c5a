"""Pack a folder of images: plan the shards, then write them on all cores. Resumable."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.packed.encode import Encoding
from lockstep.data.packed.pack_reader import (
    FORMAT,
    INDEX_FILE,
    MANIFEST_FILE,
    ROW,
    SPLITS,
    UNFINISHED_FILE,
    Manifest,
    PackedPart,
    Shard,
    is_begun,
    is_packed,
)
from lockstep.data.packed.shards import Item, ShardRecord, ShardTask, write_shard
from lockstep.data.process_pool import Advance, run_all
from lockstep.data.sets import FileSplit
from lockstep.data.sources.folder_listing import list_images, name_of, validation_folder
from lockstep.errors import ConfigError, DataError
from lockstep.files.atomic import PARTIAL, partial_of, replacing
from lockstep.files.folder_lock import holding, is_of_lock
from lockstep.files.jsonl import write_json
from lockstep.files.untrusted import read_json


@dataclass(frozen=True)
class PackPlan:
    """A plan to pack a folder; depends only on the folder and the settings, not on the machine."""

    out: Path
    name: str
    classes: tuple[str, ...]
    settings: dict[str, Any]
    source: str
    tasks: dict[str, list[ShardTask]]

    @property
    def samples(self) -> int:
        return sum(len(task.items) for tasks in self.tasks.values() for task in tasks)


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
    _check_places(folder, out)
    classes, *file_splits = list_images(folder)
    roots = folder / "train", validation_folder(folder)
    digest = hashlib.sha256()
    tasks: dict[str, list[ShardTask]] = {}
    for name, root, split in zip(SPLITS, roots, file_splits, strict=True):
        facts = [_facts(path) for path in split.paths]
        items = [
            Item(str(path), key, label)
            for path, key, label in zip(split.paths, _keys(split, root), split.labels, strict=True)
        ]
        tasks[name] = []
        for number, (start, end) in enumerate(_cut([size for size, _ in facts], shard_bytes)):
            source = _digest(items[start:end], facts[start:end])
            digest.update(source.encode())
            path = out / name / f"{name}-{number:06d}.tar"
            tasks[name].append(ShardTask(path, tuple(items[start:end]), source, encoding, skip_corrupt))
    settings = {**asdict(encoding), "shard_bytes": shard_bytes}
    return PackPlan(out, name_of(folder), classes, settings, digest.hexdigest(), tasks)


def _check_places(folder: Path, out: Path) -> None:
    if is_packed(folder):
        raise DataError(f"{folder} is already packed; pass the original folder of images")
    source, target = folder.resolve(), out.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):
        raise ConfigError(f"OUT {out} and FOLDER {folder} must not contain each other; choose another OUT")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"OUT {out} is a file; choose a new folder")
    own = {PARTIAL + name for name in (MANIFEST_FILE, UNFINISHED_FILE)}  # left by a killed process
    others = out.is_dir() and any(path.name not in own and not is_of_lock(path) for path in out.iterdir())
    if others and not is_begun(out) and not is_packed(out):
        raise ConfigError(f"OUT {out} contains other files; choose a new folder")


def _facts(path: Path) -> tuple[int, int]:
    """Return a file's size and modification time; zeros for a dangling link, which fails when it is read."""
    try:
        facts = path.stat()
    except OSError:
        return 0, 0
    return facts.st_size, facts.st_mtime_ns


def _digest(items: Sequence[Item], facts: Sequence[tuple[int, int]]) -> str:
    """Return a digest that changes with the files or their position in the data set."""
    digest = hashlib.sha256()
    for item, (size, changed) in zip(items, facts, strict=True):
        line = f"{item.key}\0{os.path.basename(item.path)}\0{item.label}\0{size}\0{changed}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


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


def write(plan: PackPlan, processes: int, advance: Advance) -> Manifest:
    """Write the missing shards and return the pack's manifest.

    Raises:
        DataError: A file cannot be written or read, or a process was killed; calling again resumes.
        CorruptImageError: An image cannot be decoded for re-encoding.
        ConfigError: The existing pack was started from other files or with other settings.
    """
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
        with holding(plan.out, "lockstep data pack"):
            if (plan.out / MANIFEST_FILE).exists():
                manifest = Manifest.read(plan.out)
                _check_same(plan, manifest.settings, manifest.source)
                advance(plan.samples)
            else:
                _begin(plan)
                manifest = _write_all(plan, processes, advance)
            _remove_traces(plan)
    except OSError as error:
        raise DataError(f"{plan.out} cannot be written ({error}); fix this and run the same command again") from None
    return manifest


def _begin(plan: PackPlan) -> None:
    """Mark the pack as started, and remove stale files of killed processes and changed sources."""
    path = plan.out / UNFINISHED_FILE
    if path.exists():
        try:
            started = read_json(path)
            settings, name = started["settings"], started["name"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged; remove {plan.out} and pack again") from None
        if name != plan.name:
            raise ConfigError(f"{plan.out} was started from another folder, {name}; choose another OUT, or remove it")
        _check_same(plan, settings, plan.source)  # if files have changed, only their shards are rewritten
    write_json(path, {"format": FORMAT, "name": plan.name, "settings": plan.settings})
    planned = {path for task in _all_tasks(plan) for path in (task.path, task.record_path)}
    for name in SPLITS:
        (plan.out / name).mkdir(exist_ok=True)
        for stale in set((plan.out / name).iterdir()) - planned:
            stale.unlink()


def _check_same(plan: PackPlan, settings: dict[str, Any], source: str) -> None:
    flags = {"short_side": "--short-side", "form": "--format", "quality": "--quality"}
    for name, value in plan.settings.items():
        if settings.get(name) != value:
            raise ConfigError(
                f"{plan.out} was packed with {flags.get(name, '--shard-mb')} "
                f"{_format_setting(name, settings.get(name))}, not {_format_setting(name, value)}; "
                f"use the same flags, choose another OUT, or remove it"
            )
    if source != plan.source:
        raise ConfigError(
            f"{plan.out} was packed from other files, or they have changed since; choose another OUT, or remove it"
        )


def _format_setting(name: str, value: Any) -> str:
    if name == "shard_bytes" and isinstance(value, int):
        return f"{value >> 20}"
    return "unset" if value is None else str(value)


def _write_all(plan: PackPlan, processes: int, advance: Advance) -> Manifest:
    records = {task.path: ShardRecord.of(task) for task in _all_tasks(plan)}
    missing = [task for task in _all_tasks(plan) if records[task.path] is None]
    advance(plan.samples - sum(len(task.items) for task in missing))
    try:
        for _ in run_all(write_shard, missing, processes, advance):
            pass
    finally:
        for task in missing:  # left by terminated processes
            for path in (task.path, task.record_path):
                partial_of(path).unlink(missing_ok=True)
    records.update((task.path, ShardRecord.of(task)) for task in missing)
    parts = {name: _write_index(plan.out / name, plan.tasks[name], records) for name in SPLITS}
    manifest = Manifest(plan.name, plan.classes, plan.settings, plan.source, parts)
    manifest.write(plan.out)
    return manifest


def _write_index(folder: Path, tasks: Sequence[ShardTask], records: Mapping[Path, ShardRecord | None]) -> PackedPart:
    """Write the split's index from the rows of its shards."""
    rows, shards, left_out = [], [], []
    for number, task in enumerate(tasks):
        record = records[task.path]
        if record is None:
            raise DataError(f"{task.path} disappeared during packing; run the same command again")
        rows += [(number, *row) for row in record.rows]
        shards.append(Shard(task.path.name, len(record.rows), record.size_bytes, record.sha256))
        left_out += record.left_out
    if not rows:
        raise DataError(f"none of the images for {folder} can be decoded, for example {left_out[0]}")
    path = folder / INDEX_FILE
    with replacing(path, durable=True) as partial:
        with partial.open("wb") as file:
            np.save(file, np.array(rows, ROW))
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    return PackedPart(len(rows), digest, tuple(shards), tuple(left_out))


def _all_tasks(plan: PackPlan) -> list[ShardTask]:
    return [task for name in SPLITS for task in plan.tasks[name]]


def _remove_traces(plan: PackPlan) -> None:
    for task in _all_tasks(plan):
        task.record_path.unlink(missing_ok=True)
    (plan.out / UNFINISHED_FILE).unlink(missing_ok=True)
